package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEnvFile: a file in docker's format reaches the machine, and variables win over it. Messages
// name the file and the line, and never show what may be a secret.
func TestEnvFile(t *testing.T) {
	cleanEnv(t)
	file := filepath.Join(t.TempDir(), "secret.env")
	write := func(text string) {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	}
	t.Setenv("HERE", "from here")
	write("\ufeff# comment\r\n\n  A=1, two = 2 \r\nQUOTED=\"x\"\nEMPTY=\nHERE\n")
	args := []string{"--container-image=r.example/db:1", "--env-file=" + file}
	c := mustConfig(t, append(args, "--env=A=3", "--env=HERE")...)
	require.Equal(t, []string{"A=1, two = 2 ", `QUOTED="x"`, "EMPTY=", "HERE=from here", "A=3",
		"HERE=from here"}, c.Containers.Machine.Env)
	for text, want := range map[string]string{
		"A=1\nhunter2\n":   "line 2 is not NAME=VALUE",
		"\n=hunter2":       "line 2 has no name",
		"hun ter2=hunter2": "line 1 has a space in its name",
		"A=hunter2\x00":    "line 1 is not text",
	} {
		write(text)
		_, err := tryConfig(args...)
		require.ErrorContains(t, err, file)
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "hunter2")
		stderr := fails(t, bootable(t), exitUsage, want, "adapt", savedImage(t, "amd64"),
			"--to="+t.TempDir(), "--env-file="+file)
		require.NotContains(t, stderr, "hunter2")
	}
	_, err := tryConfig("--container-image=r.example/db:1", "--env=hunter2")
	require.ErrorContains(t, err, "--env: variable 1 is not NAME=VALUE")
	require.NotContains(t, err.Error(), "hunter2")
}

// TestMachineOptionsOfServe: arguments come after --, and options without a container image are
// refused.
func TestMachineOptionsOfServe(t *testing.T) {
	cleanEnv(t)
	_, err := tryConfig("--workdir=/data")
	require.ErrorContains(t, err, "--container-image names none (the directory of the disks is "+
		"--work-dir)")
	_, err = tryConfig("--container-image=r.example/db:1", "--grace=soon")
	require.ErrorContains(t, err, `--grace: "soon" is not a number of seconds`)
	c := mustConfig(t, "--container-image=r.example/db:1", "--", "postgres", "-c", "a=b, c")
	require.Equal(t, []string{"postgres", "-c", "a=b, c"}, c.Containers.Machine.Args)
	require.Empty(t, c.images)
	for name, wrong := range map[string][]string{"--args": {"--", "caf\xe9"},
		"--entrypoint": {"--entrypoint=a\x00"}, "--user": {"--user=\xff"},
		"--workdir": {"--workdir=/\xff"}} {
		_, err = tryConfig(append([]string{"--container-image=r.example/db:1"}, wrong...)...)
		require.ErrorContains(t, err, name+": is not text in UTF-8")
	}
	_, err = tryConfig("--container-image=r.example/db:1", "--args=a", "--", "b")
	require.ErrorContains(t, err, "--args: and arguments after -- are both given")
}
