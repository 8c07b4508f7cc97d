package peers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// Target is a running iSCSI target with one read-write LUN over a raw file.
type Target struct {
	*Process
	Name string // of the software
	URL  string // "iscsi://host:port/name/lun"
}

// Stop ends the target.
func (t *Target) Stop() error { return t.stop() }

func targetURL(portal, name string) string {
	return fmt.Sprintf("iscsi://%s/%s/1", portal, name)
}

// StartTgtd serves raw files, LUN 1 and up, with tgtd (Debian package tgt). It needs root: tgtd's
// control socket lies in /run.
func StartTgtd(raws ...string) (*Target, error) {
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	portal := "127.0.0.1:" + strconv.Itoa(port)
	// It names the control socket and must be below 2^15. The port is unique on the machine.
	control := strconv.Itoa(port % (1 << 15))
	process, err := startProcess(exec.Command(sbin("tgtd"), "-f", "-C", control, "--iscsi",
		"portal="+portal))
	if err != nil {
		return nil, err
	}
	const name = "iqn.2017-01.io.kubevirt:tgtd"
	admin := func(args ...string) error {
		out, err := exec.Command(sbin("tgtadm"),
			append([]string{"-C", control, "--lld", "iscsi"}, args...)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("tgtadm %v: %w: %s", args, err, out)
		}
		return nil
	}
	setup := func() error {
		if err := process.until("listening", func() bool { return accepting(port) }); err != nil {
			return err
		}
		steps := [][]string{{"--op", "new", "--mode", "target", "--tid", "1", "-T", name}}
		for i, raw := range raws {
			lun := strconv.Itoa(i + 1)
			steps = append(steps, []string{"--op", "new", "--mode", "logicalunit", "--tid", "1",
				"--lun", lun, "-b", raw},
				[]string{"--op", "update", "--mode", "logicalunit", "--tid", "1", "--lun", lun,
					"--params", "thin_provisioning=1"})
		}
		// Let the initiator choose, as our target does.
		for _, digest := range []string{"HeaderDigest", "DataDigest"} {
			steps = append(steps, []string{"--op", "update", "--mode", "target", "--tid", "1",
				"--name", digest, "--value", "CRC32C,None"})
		}
		for _, args := range append(steps,
			[]string{"--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL"}) {
			if err := admin(args...); err != nil {
				return err
			}
		}
		return nil
	}
	if err := setup(); err != nil {
		process.Kill()
		return nil, err
	}
	return &Target{Name: "tgtd", Process: process, URL: targetURL(portal, name)}, nil
}

// StartGotgt serves raw files, LUN 1 and up, with the gotgt that scripts/build-gotgt.sh built. It
// writes the configuration into stateDir.
func StartGotgt(binary, stateDir string, raws ...string) (*Target, error) {
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	portal := "127.0.0.1:" + strconv.Itoa(port)
	const name = "iqn.2017-01.io.kubevirt:gotgt"
	var storages, luns []string
	for i, raw := range raws {
		storages = append(storages, fmt.Sprintf(
			`{"deviceID": %d, "path": "file:%s", "online": true, "thinProvisioning": true}`,
			1000+i, raw))
		luns = append(luns, fmt.Sprintf(`"%d": %d`, i+1, 1000+i))
	}
	config := fmt.Sprintf(`{
	"storages": [%s],
	"iscsiportals": [{"id": 0, "portal": "%s"}],
	"iscsitargets": {"%s": {"tpgts": {"1": [0]}, "luns": {%s}}}
}`, strings.Join(storages, ", "), portal, name, strings.Join(luns, ", "))
	if err := os.MkdirAll(stateDir, 0o755); err != nil {
		return nil, err
	}
	err = os.WriteFile(filepath.Join(stateDir, "config.json"), []byte(config), 0o644)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(binary, "daemon", "--log", "error", "--port", strconv.Itoa(port))
	cmd.Env = append(os.Environ(), "GOSTOR_CONFIG="+stateDir)
	process, err := startProcess(cmd)
	if err != nil {
		return nil, err
	}
	if err := process.until("listening", func() bool { return accepting(port) }); err != nil {
		process.Kill()
		return nil, err
	}
	return &Target{Name: "gotgt", Process: process, URL: targetURL(portal, name)}, nil
}

// sbin finds an administrator's program even if its directory is not in PATH.
func sbin(name string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	return filepath.Join("/usr/sbin", name)
}
