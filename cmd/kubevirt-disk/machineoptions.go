package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/osfile"
)

const (
	keyEntrypoint = "entrypoint"
	keyArgs       = "args"
	keyEnv        = "env"
	keyEnvFile    = "env-file"
	keyUser       = "user"
	keyContDir    = "workdir"
)

// machineSettings change how a container image runs: those of adapt and of serve --container-image.
func machineSettings(m *machine.Options) []settings.Setting {
	return settings.InSection(sectionMachines, []settings.Setting{
		{Key: keyEntrypoint, Env: []string{"CONTAINER_ENTRYPOINT"}, Kind: settings.KindLines,
			Usage: "`word` of another entry point of the container image; repeatable",
			To:    settings.List(&m.Entrypoint)},
		{Key: keyArgs, Env: []string{"CONTAINER_ARGS"}, Kind: settings.KindLines,
			Usage: "`word` of other arguments of the container image, also after --; repeatable",
			To:    settings.List(&m.Args)},
		{Key: keyEnv, Env: []string{"CONTAINER_ENV"}, Kind: settings.KindLines,
			Usage: "`NAME=VALUE` for the environment of the container image, or NAME for the " +
				"value that it has here; repeatable",
			To: variables(&m.Env)},
		{Key: keyEnvFile, Env: []string{"CONTAINER_ENV_FILE"}, Kind: settings.KindLines,
			Usage: "`file` with such lines, as docker has them: for secrets; repeatable"},
		{Key: keyUser, Env: []string{"CONTAINER_USER"},
			Usage: "`user` of the entry point, USER or USER:GROUP, names or numbers",
			To:    settings.Text(&m.User)},
		{Key: keyContDir, Env: []string{"CONTAINER_WORKDIR"},
			Usage: "working `directory` of the entry point",
			To:    settings.Text(&m.WorkDir)},
		{Key: "stop-signal", Env: []string{"CONTAINER_STOP_SIGNAL"},
			Usage: "`signal` that stops the entry point",
			To:    settings.Into(&m.StopSignal, parseStopSignal)},
		{Key: "hostname", Env: []string{"CONTAINER_HOSTNAME"},
			Usage: "`name` of the machine (default DHCP's)",
			To:    settings.Into(&m.Hostname, parseHostname)},
		{Key: "tty", Env: []string{"CONTAINER_TTY"}, Default: "false", Kind: settings.KindBool,
			Usage: "the console is the terminal of the entry point",
			To:    settings.Truth(&m.TTY)},
		{Key: "grace", Env: []string{"CONTAINER_GRACE"},
			Usage: "`seconds` from the stop signal to SIGKILL (default 10)",
			To:    settings.Into(&m.Grace, parseGrace)},
	})
}

// machine sets the changes to a container image. args come after the command's own.
func (l loader) machine(m *machine.Options, args []string) {
	l.Land(machineSettings(m))
	if len(args) > 0 && len(m.Args) > 0 {
		l.Problems.Add(l.Name(keyArgs), "and arguments after -- are both given: use one of them")
	} else if len(args) > 0 {
		m.Args = args
	}
	for key, words := range map[string][]string{keyEntrypoint: m.Entrypoint, keyArgs: m.Args,
		keyUser: {m.User}, keyContDir: {m.WorkDir}} {
		if slices.ContainsFunc(words, notText) { // in JSON, it would become something else
			l.Problems.Add(l.Name(key), "is not text in UTF-8")
		}
	}
	var all []string
	for _, file := range l.Lines(keyEnvFile) {
		all = append(all, l.envFile(file)...)
	}
	m.Env = append(all, m.Env...) // of two with one name, the last one counts
}

func parseStopSignal(text string) (string, error) {
	_, err := machine.ParseSignal(text)
	return text, err
}

func parseHostname(text string) (string, error) {
	if !machine.IsHostname(text) {
		return "", fmt.Errorf("%q cannot be the name of a machine: it has letters, digits, \"-\", "+
			"\"_\" and \".\", at most %d", text, machine.MaxHostname)
	}
	return text, nil
}

func parseGrace(text string) (uint, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%q is not a number of seconds", text)
	}
	if n > machine.MaxSeconds {
		return 0, fmt.Errorf("%d is more than a day: name at most %d seconds", n,
			machine.MaxSeconds)
	}
	return uint(n), nil
}

// variables is a field that takes variables of the environment.
func variables(at *[]string) settings.Landing {
	return settings.Landing{At: at, Set: func(given []string) error {
		var wrong []error
		for i, text := range given {
			variable, err := parseVariable(text)
			if err != nil {
				wrong = append(wrong, fmt.Errorf("variable %d %w", i+1, err))
			}
			*at = append(*at, variable)
		}
		return errors.Join(wrong...)
	}}
}

// envFile reads a file of variables in docker's format. Messages name lines and not what is in
// them: it may be a secret.
func (l loader) envFile(file string) (all []string) {
	text, err := l.Read(file)
	if err != nil {
		l.Problems.Add(l.Name(keyEnvFile), "%q cannot be read: %v", file, osfile.WithoutPath(err))
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
			l.Problems.Add(l.Name(keyEnvFile), "%q: line %d %v", file, i+1, err)
		}
		all = append(all, variable)
	}
	return all
}

// notText finds what no argument and no variable of a program can be.
func notText(s string) bool { return !utf8.ValidString(s) || strings.ContainsRune(s, 0) }

// parseVariable reads NAME=VALUE, or NAME of a variable of this process. No error shows the text.
func parseVariable(text string) (string, error) {
	name, _, ok := strings.Cut(text, "=")
	switch {
	case notText(text):
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

// containerMachine sets how serve runs its container images. Without such images the settings mean
// nothing.
func (l loader) containerMachine(m *machine.Options, images bool, args []string) {
	if images {
		l.machine(m, args)
		return
	}
	for _, row := range machineSettings(m) {
		if source := l.Source(row.Key); source != "" {
			hint := ""
			if row.Key == keyContDir {
				hint = fmt.Sprintf(" (the directory of the disks is --%s)", keyWorkDir)
			}
			l.Problems.Add(source, "is for container images, and --%s names none%s",
				keyContainerImage, hint)
		}
	}
}
