package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"kubevirt.io/disk/adapter/machine"
)

const (
	keyEntrypoint = "entrypoint"
	keyArgs       = "args"
	keyEnv        = "env"
	keyEnvFile    = "env-file"
	keyUser       = "user"
	keyContDir    = "workdir"
	keyStopSignal = "stop-signal"
	keyGrace      = "grace"
	keyHostname   = "hostname"
	keyTTY        = "tty"
)

// machineSettings change how a container image runs: those of adapt and of serve --container-image.
var machineSettings = []setting{
	{key: keyEntrypoint, env: []string{"CONTAINER_ENTRYPOINT"}, kind: kindLines,
		usage: "`word` of another entry point of the container image; repeatable"},
	{key: keyArgs, env: []string{"CONTAINER_ARGS"}, kind: kindLines,
		usage: "`word` of other arguments of the container image, also after --; repeatable"},
	{key: keyEnv, env: []string{"CONTAINER_ENV"}, kind: kindLines,
		usage: "`NAME=VALUE` for the environment of the container image, or NAME for the value " +
			"that it has here; repeatable"},
	{key: keyEnvFile, env: []string{"CONTAINER_ENV_FILE"}, kind: kindLines,
		usage: "`file` with such lines, as docker has them: for secrets; repeatable"},
	{key: keyUser, env: []string{"CONTAINER_USER"},
		usage: "`user` of the entry point, USER or USER:GROUP, names or numbers"},
	{key: keyContDir, env: []string{"CONTAINER_WORKDIR"},
		usage: "working `directory` of the entry point"},
	{key: keyStopSignal, env: []string{"CONTAINER_STOP_SIGNAL"},
		usage: "`signal` that stops the entry point"},
	{key: keyHostname, env: []string{"CONTAINER_HOSTNAME"},
		usage: "`name` of the machine (default DHCP's)"},
	{key: keyTTY, env: []string{"CONTAINER_TTY"}, def: "false", kind: kindBool,
		usage: "the console is the terminal of the entry point"},
	{key: keyGrace, env: []string{"CONTAINER_GRACE"},
		usage: "`seconds` from the stop signal to SIGKILL (default 10)"},
}

// machineKeys are the keys of machineSettings.
var machineKeys = []string{keyEntrypoint, keyArgs, keyEnv, keyEnvFile, keyUser, keyContDir,
	keyStopSignal, keyHostname, keyTTY, keyGrace}

// machine returns the changes to a container image. args come after the command's own.
func (l *loader) machine(args []string) machine.Options {
	o := machine.Options{Entrypoint: l.lines(keyEntrypoint), Args: l.lines(keyArgs),
		User: l.text(keyUser), WorkDir: l.text(keyContDir), StopSignal: l.text(keyStopSignal),
		Hostname: l.text(keyHostname), TTY: l.bool(keyTTY)}
	if len(args) > 0 && len(o.Args) > 0 {
		l.problems.Add(l.name(keyArgs), "and arguments after -- are both given: use one of them")
	} else if len(args) > 0 {
		o.Args = args
	}
	for _, file := range l.lines(keyEnvFile) {
		o.Env = append(o.Env, l.envFile(file)...)
	}
	for i, text := range l.lines(keyEnv) {
		variable, err := parseVariable(text)
		if err != nil {
			l.problems.Add(l.name(keyEnv), "variable %d %v", i+1, err)
		}
		o.Env = append(o.Env, variable)
	}
	if _, err := machine.ParseSignal(o.StopSignal); err != nil {
		l.problems.Add(l.name(keyStopSignal), "%v", err)
	}
	if text := l.text(keyGrace); text != "" {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			l.problems.Add(l.name(keyGrace), "%q is not a number of seconds", text)
		} else if n > machine.MaxSeconds {
			l.problems.Add(l.name(keyGrace), "%d is more than a day: name at most %d seconds", n,
				machine.MaxSeconds)
		}
		o.Grace = uint(n)
	}
	return o
}

// envFile reads a file of variables in docker's format. Messages name lines and not what is in
// them: it may be a secret.
func (l *loader) envFile(file string) (all []string) {
	text, err := l.read(file)
	if err != nil {
		l.problems.Add(l.name(keyEnvFile), "%q cannot be read: %v", file, withoutPath(err))
		return nil
	}
	text = bytes.TrimPrefix(text, []byte("\ufeff"))
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimLeftFunc(strings.TrimSuffix(line, "\r"), unicode.IsSpace)
		if line == "" || line[0] == '#' {
			continue
		}
		variable, err := parseVariable(line)
		if err != nil {
			l.problems.Add(l.name(keyEnvFile), "%q: line %d %v", file, i+1, err)
		}
		all = append(all, variable)
	}
	return all
}

// parseVariable reads NAME=VALUE, or NAME of a variable of this process. No error shows the text.
func parseVariable(text string) (string, error) {
	name, _, ok := strings.Cut(text, "=")
	switch {
	case !utf8.ValidString(text) || strings.ContainsRune(text, 0):
		return "", errors.New("is not text in UTF-8")
	case name == "":
		return "", errors.New("has no name before the \"=\"")
	case strings.ContainsFunc(name, unicode.IsSpace):
		return "", errors.New("has a space in its name: write NAME=VALUE")
	case ok:
		return text, nil
	}
	value, ok := os.LookupEnv(name)
	if !ok {
		return "", errors.New("is not NAME=VALUE, and not the name of a variable that is set here")
	}
	if !utf8.ValidString(value) {
		return "", errors.New("is the name of a variable whose value is not text in UTF-8")
	}
	return name + "=" + value, nil
}

// lines returns the elements of a repeatable setting as they were written. A variable of the
// environment, or a text in the YAML file, has one in each line.
func (l *loader) lines(key string) []string {
	if l.source(key) == "" {
		return nil
	}
	given := l.given(key)
	_, list := l.values[key].([]string)
	if l.flags.Changed(key) || l.env[key] == "" && list {
		return given
	}
	return strings.Split(strings.TrimSuffix(given[0], "\n"), "\n")
}

// containerMachine returns how serve runs its container images. Without such images the settings
// mean nothing.
func (l *loader) containerMachine(images bool, args []string) machine.Options {
	if images {
		return l.machine(args)
	}
	for _, key := range machineKeys {
		if source := l.source(key); source != "" {
			hint := ""
			if key == keyContDir {
				hint = fmt.Sprintf(" (the directory of the disks is --%s)", keyWorkDir)
			}
			l.problems.Add(source, "is for container images, and --%s names none%s",
				keyContainerImage, hint)
		}
	}
	return machine.Options{}
}
