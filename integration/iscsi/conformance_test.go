package iscsi

// The name of this file is the last one, because go test begins with the last one's parallel tests:
// TestConformance sleeps for minutes, and the others run meanwhile.

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
	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/internal/testtool"
)

// conformanceSize is the size of the LUN. The suite wants at least 8000 blocks of 512 bytes, and
// some tests 16 MiB.
const conformanceSize = 64 << 20

// conformanceLUN is a configuration of the matrix, and how to offer it.
type conformanceLUN struct {
	conformance.Configuration
	// start returns the LUN's URLs, and a check to run before each test.
	start func(t *testing.T) (urls []string, alive func() error)
}

// conformanceMatrix has the configurations that together run every test of the suite.
func conformanceMatrix(all []string) []conformanceLUN {
	matrix := []conformanceLUN{
		{
			Configuration: conformance.Configuration{Name: "thin, two paths"},
			start: func(t *testing.T) ([]string, func() error) {
				return startForSuite(t, map[string]string{"ACCESS_MODE": "write-shared",
					"LISTEN": "127.0.0.1:0," + rig.SecondLoopback()})
			},
		},
		{
			Configuration: conformance.Configuration{Name: "read-only", Only: []string{
				// The other suites write, and fail because they cannot.
				"Inquiry", "Mandatory", "Prefetch10", "Prefetch16", "Read6", "Read10", "Read12",
				"Read16", "ReadCapacity10", "ReadCapacity16",
				"ReadOnly", "ReportSupportedOpcodes",
				"TestUnitReady",
			}},
			start: func(t *testing.T) ([]string, func() error) {
				return startForSuite(t, map[string]string{"ACCESS_MODE": "read-shared"})
			},
		},
	}
	withCHAP := conformance.Configuration{Name: "with CHAP", Only: []string{"iSCSICHAP"}}
	if _, err := withCHAP.Selected(all); err == nil { // libiscsi 1.20 and later
		matrix = append(matrix, conformanceLUN{withCHAP, func(t *testing.T) ([]string,
			func() error) {
			urls, alive := startForSuite(t, map[string]string{"CHAP_USERNAME": rig.User,
				"CHAP_PASSWORD": rig.Password})
			for i, url := range urls {
				urls[i] = strings.Replace(url, "://", "://"+rig.User+"%"+rig.Password+"@", 1)
			}
			return urls, alive
		}})
	}
	return matrix
}

// startForSuite starts the daemon with one LUN and returns a URL for each of the two paths to it.
func startForSuite(t *testing.T, env map[string]string) (urls []string,
	alive func() error) {
	dir := t.TempDir()
	rig.MakeRaw(t, filepath.Join(dir, "lun.raw"), conformanceSize)
	d := rig.Start(t, rig.Config{DiskDir: dir, Env: env})
	urls = []string{d.URL(1), strings.Replace(d.URL(1), d.Portals[0], d.Portals[len(d.Portals)-1],
		1)}
	return urls, func() error {
		if !d.Running() {
			return fmt.Errorf("kubevirt-disk has ended:\n%s", d.Output())
		}
		return nil
	}
}

// TestConformance runs libiscsi's suite over the matrix and compares the outcome with
// conformance/expected.txt.
func TestConformance(t *testing.T) {
	t.Parallel() // it sleeps for a minute
	rig.Need(t, conformance.Tool)
	all := testtool.Must(conformance.List(t.Context()))(t)
	expected := expectations(t)

	matrix := conformanceMatrix(all)
	results := make([][]conformance.Result, len(matrix))
	t.Run("matrix", func(t *testing.T) {
		for i, lun := range matrix {
			t.Run(lun.Name, func(t *testing.T) {
				t.Parallel() // each has a target of its own
				tests := testtool.Must(lun.Selected(all))(t)
				urls, alive := lun.start(t)
				results[i] = testtool.Must(conformance.Run(t.Context(), conformance.Options{
					Tests: tests, Hangs: expected,
					Env:    rig.ClientEnv(),
					Before: func() ([]string, error) { return urls, alive() },
				}))(t)
				report(t, "kubevirt-disk, "+rig.Clients.Name+", "+lun.Name, results[i])
			})
		}
	})
	runs := make(map[string][]conformance.Result, len(matrix))
	for i, lun := range matrix {
		runs[lun.Name] = results[i]
	}
	merged := conformance.Merge(all, runs)
	report(t, "kubevirt-disk, "+rig.Clients.Name, merged)
	for _, problem := range conformance.Compare(merged, expected) {
		t.Error(problem)
	}
}

// expectations are those of conformance/expected.txt for the generation of clients.
func expectations(t *testing.T) map[string]conformance.Expectation {
	t.Helper()
	file := testtool.Must(os.Open("../conformance/expected.txt"))(t)
	defer file.Close()
	expected, err := conformance.ReadExpectations(file, rig.Clients.Name)
	require.NoError(t, err, "../conformance/expected.txt")
	return expected
}

// TestConformancePeers runs the suite against tgtd and gotgt and prints how they do. It says
// nothing about our code, so it only runs if KUBEVIRT_DISK_PEERS names the directory of gotgt (see
// scripts/build-gotgt.sh).
func TestConformancePeers(t *testing.T) {
	gotgtDir := os.Getenv("KUBEVIRT_DISK_PEERS")
	if gotgtDir == "" {
		t.Skip("a measurement, not a check: set KUBEVIRT_DISK_PEERS to the directory of gotgt")
	}
	rig.Need(t, conformance.Tool, "tgtd")
	gotgt := testtool.Must(filepath.Abs(filepath.Join(gotgtDir, "gotgt")))(t)

	for name, startPeer := range map[string]func(dir, raw string) (*peers.Target, error){
		"tgtd": func(_, raw string) (*peers.Target, error) { return peers.StartTgtd(raw) },
		"gotgt": func(dir, raw string) (*peers.Target, error) {
			return peers.StartGotgt(gotgt, dir, raw)
		},
	} {
		t.Run(name, func(t *testing.T) {
			raw := filepath.Join(t.TempDir(), "lun.raw")
			rig.MakeRaw(t, raw, conformanceSize)
			var target *peers.Target
			deaths := -1
			results := testtool.Must(conformance.Run(t.Context(), conformance.Options{
				Timeout: 10 * time.Second,
				Env:     rig.ClientEnv(),
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
			}))(t)
			require.NoError(t, target.Stop())
			report(t, name, results)
			fmt.Printf("conformance: %s died %d times\n", name, deaths)
		})
	}
}

// report prints the totals and the names of the tests that did not pass, even if this test passes.
func report(t *testing.T, name string, results []conformance.Result) {
	byOutcome := make(map[conformance.Outcome][]string)
	for _, r := range results {
		byOutcome[r.Outcome] = append(byOutcome[r.Outcome], r.Name)
	}
	text := fmt.Sprintf("conformance: %s: %s\n", name, conformance.Count(results))
	for _, outcome := range []conformance.Outcome{conformance.Failed, conformance.Hung,
		conformance.Skipped} {
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

// TestConformanceHarness checks that the harness notices a failing target: here nothing listens.
func TestConformanceHarness(t *testing.T) {
	t.Parallel() // it waits
	rig.Need(t, conformance.Tool)
	port := testtool.Must(peers.FreePort())(t)
	results := testtool.Must(conformance.Run(context.Background(), conformance.Options{
		URLs:    []string{fmt.Sprintf("iscsi://127.0.0.1:%d/%s/1", port, peers.DefaultTarget)},
		Tests:   []string{"TestUnitReady.Simple"},
		Timeout: 20 * time.Second,
		Env:     rig.ClientEnv(),
	}))(t)
	require.Len(t, results, 1)
	require.Equal(t, conformance.Hung, results[0].Outcome)
	require.NotEmpty(t, results[0].Detail)
}
