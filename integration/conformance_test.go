package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/conformance"
	"kubevirt.io/disk/integration/peers"
)

// conformanceSize is the size of the LUN: the suite wants at least 8000 blocks of 512 bytes, some tests 16 MiB.
const conformanceSize = 64 << 20

// TestConformance runs libiscsi's suite against a read-write LUN and holds the outcome against conformance/expected.txt.
func TestConformance(t *testing.T) {
	requireTools(t, conformance.Tool)
	file, err := os.Open("conformance/expected.txt")
	require.NoError(t, err)
	defer file.Close()
	expected, err := conformance.ReadExpectations(file)
	require.NoError(t, err, "conformance/expected.txt")

	dir := t.TempDir()
	makeRaw(t, filepath.Join(dir, "lun.raw"), conformanceSize)
	d := start(t, config{diskDir: dir, env: map[string]string{"ACCESS_MODE": "write-shared"}})

	url := d.url(1)
	results, err := conformance.Run(t.Context(), conformance.Options{
		URLs: []string{url, url}, // the second path is for the multipath tests
		Env:  clientEnv(),
		Before: func() ([]string, error) {
			if !d.Running() {
				return nil, fmt.Errorf("kubevirt-disk has ended:\n%s", d.Output())
			}
			return []string{url, url}, nil
		},
	})
	require.NoError(t, err)
	report(t, "kubevirt-disk", results)
	for _, problem := range conformance.Compare(results, expected) {
		t.Error(problem)
	}
}

// TestConformancePeers runs the same suite against tgtd and gotgt and prints how they do. It says nothing about our code, so it
// only runs where KUBEVIRT_DISK_PEERS names the directory that holds gotgt (see scripts/build-gotgt.sh).
func TestConformancePeers(t *testing.T) {
	gotgtDir := os.Getenv("KUBEVIRT_DISK_PEERS")
	if gotgtDir == "" {
		t.Skip("a measurement, not a check: set KUBEVIRT_DISK_PEERS to the directory of gotgt")
	}
	requireTools(t, conformance.Tool, "tgtd")
	gotgt, err := filepath.Abs(filepath.Join(gotgtDir, "gotgt"))
	require.NoError(t, err)

	for name, startPeer := range map[string]func(dir, raw string) (*peers.Target, error){
		"tgtd":  func(_, raw string) (*peers.Target, error) { return peers.StartTgtd(raw) },
		"gotgt": func(dir, raw string) (*peers.Target, error) { return peers.StartGotgt(gotgt, dir, raw) },
	} {
		t.Run(name, func(t *testing.T) {
			raw := filepath.Join(t.TempDir(), "lun.raw")
			makeRaw(t, raw, conformanceSize)
			var target *peers.Target
			deaths := -1
			results, err := conformance.Run(t.Context(), conformance.Options{
				Timeout: 10 * time.Second,
				Env:     clientEnv(),
				Before: func() ([]string, error) {
					if target == nil || !target.Running() {
						deaths++
						var err error
						if target, err = startPeer(t.TempDir(), raw); err != nil {
							return nil, err
						}
					}
					return []string{target.URL, target.URL}, nil
				},
			})
			require.NoError(t, err)
			require.NoError(t, target.Stop())
			report(t, name, results)
			fmt.Printf("conformance: %s died %d times\n", name, deaths)
		})
	}
}

// report prints the totals and the names of what did not pass, also when the test passes.
func report(t *testing.T, name string, results []conformance.Result) {
	byOutcome := make(map[conformance.Outcome][]string)
	for _, r := range results {
		byOutcome[r.Outcome] = append(byOutcome[r.Outcome], r.Name)
	}
	text := fmt.Sprintf("conformance: %s: %s\n", name, conformance.Count(results))
	for _, outcome := range []conformance.Outcome{conformance.Failed, conformance.Hung, conformance.Skipped} {
		if names := byOutcome[outcome]; len(names) > 0 {
			sort.Strings(names)
			text += fmt.Sprintf("conformance: %s %s: %s\n", name, outcome, strings.Join(names, " "))
		}
	}
	fmt.Print(text)
	if path := os.Getenv("KUBEVIRT_DISK_CONFORMANCE_OUT"); path != "" {
		for _, r := range results {
			text += fmt.Sprintf("%s %s: %s\n", r.Outcome, r.Name, r.Detail)
		}
		require.NoError(t, os.WriteFile(path+"."+name, []byte(text), 0o644))
	}
}

// TestConformanceHarness shows that the harness tells a failing target from a passing one: nothing listens there.
func TestConformanceHarness(t *testing.T) {
	requireTools(t, conformance.Tool)
	port, err := peers.FreePort()
	require.NoError(t, err)
	results, err := conformance.Run(context.Background(), conformance.Options{
		URLs:    []string{fmt.Sprintf("iscsi://127.0.0.1:%d/%s/1", port, peers.DefaultTarget)},
		Tests:   []string{"TestUnitReady.Simple"},
		Timeout: 20 * time.Second,
		Env:     clientEnv(),
	})
	require.NoError(t, err)
	require.Len(t, results, 1)
	require.Equal(t, conformance.Hung, results[0].Outcome)
	require.NotEmpty(t, results[0].Detail)
}
