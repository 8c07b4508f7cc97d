package chap

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// The environment variables that carry credentials. Those of the first group may have the suffix
// _FILE: then they name a file that holds the value.
const (
	envUsername       = "CHAP_USERNAME"
	envPassword       = "CHAP_PASSWORD"
	envMutualUsername = "CHAP_MUTUAL_USERNAME"
	envMutualPassword = "CHAP_MUTUAL_PASSWORD"
	envInitiatorName  = "CHAP_INITIATOR_NAME"
	fileSuffix        = "_FILE"

	// Callers of the original wrapper set these.
	envOldUsername       = "USERNAME"
	envOldPassword       = "PASSWORD"
	envOldUsernameBase64 = "USERNAME_BASE64"
	envOldPasswordBase64 = "PASSWORD_BASE64"

	// The keys of a Kubernetes secret of type iscsi-chap, as envFrom passes them on. The names are
	// those of open-iscsi, where "in" means what comes in to the initiator: the target's
	// credential.
	envKubeUsername   = "node.session.auth.username"
	envKubePassword   = "node.session.auth.password"
	envKubeUsernameIn = "node.session.auth.username_in"
	envKubePasswordIn = "node.session.auth.password_in"
)

// FromEnvironment reads the CHAP configuration from the environment. lookup is usually os.LookupEnv
// and readFile os.ReadFile. The variables are:
//
//   - CHAP_USERNAME and CHAP_PASSWORD: what initiators must present; CHAP_MUTUAL_USERNAME and
//     CHAP_MUTUAL_PASSWORD: what the target presents to an initiator that asks. With the suffix
//     _FILE each of the four names a file that holds the value; one newline at the file's end
//     does not count.
//   - USERNAME and PASSWORD, or USERNAME_BASE64 and PASSWORD_BASE64 (standard or URL alphabet):
//     what initiators must present. The base64 variable wins over the plain one. USERNAME
//     counts only with a password: desktop sessions set it.
//   - node.session.auth.username and .password: what initiators must present; .username_in and
//     .password_in: what the target presents.
//   - CHAP_INITIATOR_NAME: the only iSCSI initiator name (see CheckInitiatorName) that may use the
//     credential. Without it any name may. It may be given as a file, too.
//
// An empty variable counts as unset. Half a credential, sources that disagree and values that are
// not safe to use are errors. Errors name all variables that are wrong, and never show a value.
// They show a file's name only if the file is on this machine, or if the path is absolute and its
// top directory exists: anything else may be a secret in the wrong variable.
func FromEnvironment(lookup func(string) (string, bool),
	readFile func(string) ([]byte, error)) (Config, error) {
	e := environment{lookup: lookup, readFile: readFile}
	initiator := e.credential("credential of the initiator",
		e.pair(e.valueOrFile(envUsername), e.valueOrFile(envPassword)),
		e.pair(e.base64Or(envOldUsernameBase64, envOldUsername),
			e.base64Or(envOldPasswordBase64, envOldPassword)),
		e.pair(e.value(envKubeUsername), e.value(envKubePassword)))
	target := e.credential("credential of the target (mutual CHAP)",
		e.pair(e.valueOrFile(envMutualUsername), e.valueOrFile(envMutualPassword)),
		e.pair(e.value(envKubeUsernameIn), e.value(envKubePasswordIn)))
	name := e.valueOrFile(envInitiatorName)
	if name.set() {
		if err := CheckInitiatorName(name.value); err != nil {
			e.problem("%s %w", name.from, err)
		}
	}
	if len(e.problems) > 0 {
		return Config{}, errors.Join(e.problems...) // later checks would only repeat them
	}
	switch {
	case target.set() && !initiator.set():
		e.problem("%s set mutual CHAP, but there is no credential for initiators; set %s and %s "+
			"too", target.names(), envUsername, envPassword)
	case target.set() && target.password.value == initiator.password.value:
		e.problem("%s and %s hold the same secret, so a peer could use one challenge to answer "+
			"the other (RFC 7143 9.2.1); use two different ones", initiator.password.from,
			target.password.from)
	case name.set() && !initiator.set():
		e.problem("%s binds a credential to an initiator, but there is none; set %s and %s too",
			name.from, envUsername, envPassword)
	}
	if len(e.problems) > 0 {
		return Config{}, errors.Join(e.problems...)
	}
	return Config{Initiator: initiator.credential(), Target: target.credential(),
		InitiatorName: name.value}, nil
}

// setting is the value of a variable. If it is not set, from is the variable to set.
type setting struct {
	from  string // the variable, for messages
	value string
	bad   bool // already reported; do not report it again
}

func (s setting) set() bool { return s.value != "" }

// pair is a user name and a password from one source.
type pair struct{ username, password setting }

func (p pair) set() bool { return p.username.set() && p.password.set() }

func (p pair) names() string { return p.username.from + " and " + p.password.from }

func (p pair) credential() Credential {
	return Credential{Username: p.username.value, Secret: NewSecret(p.password.value)}
}

// environment reads variables and collects all errors in them.
type environment struct {
	lookup   func(string) (string, bool)
	readFile func(string) ([]byte, error)
	problems []error
}

func (e *environment) problem(format string, args ...any) {
	e.problems = append(e.problems, fmt.Errorf(format, args...))
}

func (e *environment) bad(name, format string, args ...any) setting {
	e.problem(name+" "+format, args...)
	return setting{from: name, bad: true}
}

// value reads a variable.
func (e *environment) value(name string) setting {
	v, _ := e.lookup(name)
	return setting{from: name, value: v}
}

// valueOrFile reads a variable, or the file named by the variable with the suffix _FILE.
func (e *environment) valueOrFile(name string) setting {
	plain, path := e.value(name), e.value(name+fileSuffix)
	if !path.set() {
		return plain
	}
	b, err := e.readFile(path.value)
	if err != nil {
		if perr, ok := errors.AsType[*fs.PathError](err); ok {
			err = perr.Err
		}
		return e.bad(path.from, "names %s that cannot be read: %w", fileOf(path.value), err)
	}
	content := trimNewline(string(b))
	switch {
	case content == "":
		return e.bad(path.from, "names the file %q, which is empty", path.value)
	case plain.set() && plain.value != content:
		return e.bad(path.from, "and %s disagree; set only one of them", name)
	}
	return setting{from: path.from, value: content}
}

// fileOf names a file in a message. It hides a path that does not exist on this machine, because it
// may be a secret in the wrong variable.
func fileOf(path string) string {
	known := path
	if filepath.IsAbs(path) {
		top, _, _ := strings.Cut(filepath.Clean(path)[1:], "/")
		known = "/" + top // perhaps the mount below it is missing
	}
	if _, err := os.Lstat(known); err != nil || known == "/" {
		return "a file (not shown, as it may be a secret in the wrong variable)"
	}
	return fmt.Sprintf("the file %q", path)
}

// base64Or reads a base64 variable or, if that is empty, a plain one.
func (e *environment) base64Or(encoded, plain string) setting {
	v := e.value(encoded)
	if !v.set() {
		return e.value(plain)
	}
	// Accept both alphabets, with or without padding, and drop the line breaks that encoders put
	// in.
	digits := strings.NewReplacer("-", "+", "_", "/", "\r", "", "\n", "", " ", "").Replace(v.value)
	b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(digits, "="))
	if err != nil {
		return e.bad(encoded, "is not base64")
	}
	// The original wrapper passed the value through a shell, which drops the newline that "echo
	// secret | base64" adds.
	content := trimNewline(string(b))
	if content == "" {
		return e.bad(encoded, "is the base64 of nothing")
	}
	return setting{from: encoded, value: content}
}

func trimNewline(s string) string {
	s, cut := strings.CutSuffix(s, "\n")
	if cut {
		s = strings.TrimSuffix(s, "\r")
	}
	return s
}

// pair joins a user name and a password and checks both.
func (e *environment) pair(username, password setting) pair {
	switch {
	case username.bad || password.bad:
		return pair{} // reported
	case username.from == envOldUsername && !password.set():
		return pair{} // desktop sessions set USERNAME by themselves
	case username.set() && !password.set():
		e.problem("%s is set but %s is not; a credential needs both", username.from, password.from)
		return pair{}
	case password.set() && !username.set():
		e.problem("%s is set but %s is not; a credential needs both", password.from, username.from)
		return pair{}
	case !username.set():
		return pair{}
	}
	ok := true
	if err := checkUsername(username.value); err != nil {
		e.problem("%s %w", username.from, err)
		ok = false
	}
	if err := checkSecret(NewSecret(password.value)); err != nil {
		e.problem("%s %w", password.from, err)
		ok = false
	}
	if !ok {
		return pair{}
	}
	return pair{username: username, password: password}
}

// credential chooses among the sources that are set. They may repeat each other but not differ.
func (e *environment) credential(what string, sources ...pair) pair {
	var first pair
	for _, p := range sources {
		switch {
		case !p.set():
		case !first.set():
			first = p
		case first.username.value != p.username.value || first.password.value != p.password.value:
			e.problem("%s disagree with %s about the %s; set only one of the pairs", first.names(),
				p.names(), what)
		}
	}
	return first
}
