package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/testtool"
)

// complete asks for completion as the scripts of the shells do.
func complete(t *testing.T, args ...string) (words []string, directive string) {
	t.Helper()
	var stdout bytes.Buffer
	a := &app{stdout: &stdout, stderr: new(bytes.Buffer)}
	require.Equal(t, exitDone, a.execute(append([]string{"__complete"}, args...)))
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	last := len(lines) - 1
	return lines[:last], lines[last]
}

const (
	noFiles    = ":4"
	extensions = ":8"
	dirsOnly   = ":16"
	anyFile    = ":0"
)

func TestCompletionOfValues(t *testing.T) {
	for _, c := range []struct {
		args      []string
		want      []string
		directive string
	}{
		{[]string{"serve", "--copy-mode", ""},
			[]string{"clone", "copy-on-read", "copy-on-write", "none"}, noFiles},
		{[]string{"serve", "--access-mode", ""},
			[]string{"write-exclusive", "write-shared", "read-shared"}, noFiles},
		{[]string{"serve", "--on-image-change", ""}, []string{"fail", "keep"}, noFiles},
		{[]string{"serve", "--log-level", ""}, []string{"debug", "info", "warn", "error"}, noFiles},
		{[]string{"serve", "--log-format", ""}, []string{"console", "json"}, noFiles},
		{[]string{"serve", "--disk-dir", ""}, []string{}, dirsOnly},
		{[]string{"serve", "--work-dir", ""}, []string{}, dirsOnly},
		{[]string{"serve", "--persistent-dir", ""}, []string{}, dirsOnly},
		{[]string{"serve", "--config", ""}, []string{"yaml", "yml"}, extensions},
		{[]string{"serve", "--ready-file", ""}, []string{}, anyFile},
		{[]string{"serve", "--size", ""}, []string{}, noFiles},
		{[]string{"serve", "a.raw", ""}, imageExtensions, extensions},
		{[]string{"inspect", ""}, imageExtensions, extensions},
		{[]string{"convert", ""}, imageExtensions, extensions},
		{[]string{"convert", "a.qcow2", ""}, []string{"raw", "img", "qcow2"}, extensions},
		{[]string{"convert", "a.qcow2", "a.raw", ""}, []string{}, noFiles},
		{[]string{"convert", "--target-format", ""}, []string{"raw", "qcow2"}, noFiles},
		{[]string{"convert", "--compress", ""}, []string{"zstd", "zlib", "none"}, noFiles},
		{[]string{"xml", "--bus", ""}, []string{"virtio", "scsi", "sata", "usb"}, noFiles},
		{[]string{"xml", "--access-mode", ""}, []string{"write-exclusive",
			"write-shared", "read-shared"}, noFiles},
		{[]string{"handover", ""}, []string{}, noFiles},
		{[]string{"handover", "--control-socket", ""}, []string{}, anyFile},
	} {
		words, directive := complete(t, c.args...)
		require.Equal(t, c.want, append([]string{}, words...), c.args)
		require.Equal(t, c.directive, directive, c.args)
	}
}

// TestCompletionIsAccepted checks that each completed value is valid, and that the error about a
// wrong value lists all of them.
func TestCompletionIsAccepted(t *testing.T) {
	cleanEnv(t)
	settings := 0
	for _, s := range newConfig().settings() {
		if s.Choices == nil {
			continue
		}
		settings++
		const image = "--image=r.example/a:1"
		_, err := tryConfig("--"+s.Key+"=nonsense", "--listen=127.0.0.1:0", image)
		require.Error(t, err)
		for _, value := range s.Choices {
			require.ErrorContains(t, err, value)
			_, err := tryConfig("--"+s.Key+"="+value, "--listen=127.0.0.1:0", image)
			require.NoError(t, err)
		}
	}
	require.Equal(t, 8, settings)
	for flag, values := range choices {
		for _, value := range values {
			switch flag {
			case keyFormat:
				require.NoError(t, testtool.Err(image.ParseFormat(value)))
			case flagTargetFormat, flagCompress: // see TestConvertToQcow2
			default: // those of xml
				works(t, nil, "xml", "--host=10.0.0.1", "--lun=1", "--"+flag+"="+value,
					"--target-dev="+deviceFor(flag, value))
			}
		}
	}
}

// deviceFor is a device name that fits the value of the flag.
func deviceFor(flag, value string) string {
	if flag == "bus" && value == "virtio" {
		return "vda"
	}
	return "sda"
}

// TestCompletionSpeaksPlainly: the help needs backquotes around the name of a value, and nobody
// wants to see them in a shell.
func TestCompletionSpeaksPlainly(t *testing.T) {
	for _, args := range [][]string{{"serve", "--"}, {"snapshot", "create", "--"}, {"push", "--"}} {
		words, _ := complete(t, args...)
		require.Greater(t, len(words), 3)
		require.NotContains(t, strings.Join(words, "\n"), "`")
	}
}

// TestFlagsSpeakPlainly checks that users do not see the Go library's errors about wrong values.
func TestFlagsSpeakPlainly(t *testing.T) {
	for want, args := range map[string][]string{
		`--for: "3" is not a duration: write it as 90s or 5m`: {"handover", "--lun=1",
			"--to=iqn.2020-01.a", "--for=3"},
		`--lun: "x" is not a LUN: use 1 to 16383`: {"handover", "--lun=x",
			"--finish"},
		`--lun: "65536" is not a LUN: use 1 to 16383`: {"handover", "--lun=65536",
			"--finish"},
		`--lun: "one" is not a LUN: use 1 to 16383`:                 {"xml", "--lun=one"},
		`--timeout: "3" is not a duration: write it as 90s or 5m`:   {"healthcheck", "--timeout=3"},
		`--timeout: "3s5" is not a duration: write it as 90s or 5m`: {"xml", "--timeout=3s5"},
		`--boot-order: "-1" is not a number: use one from 1`:        {"xml", "--boot-order=-1"},
		`--force: "perhaps" is neither true nor false`: {"convert", "--force=perhaps",
			"a", "b"},
		`--insecure-no-auth: "perhaps" is neither true nor`: {"serve",
			"--insecure-no-auth=perhaps"},
	} {
		stderr := fails(t, nil, exitUsage, want, args...)
		require.NotContains(t, stderr, "strconv")
		require.NotContains(t, stderr, "time:")
		require.NotContains(t, stderr, "invalid argument")
	}
}
