package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"kubevirt.io/disk/integration/peers"
	"kubevirt.io/disk/target/targettest"
	"kubevirt.io/disk/volume/api"
)

// uploadSize is the size of the uploaded raw disk, bytes, without zeros.
const uploadSize = 1 << 30

// uploader is a way to bring a file to storage.
type uploader struct {
	name string
	// run uploads into an empty directory, and returns how many seconds it took.
	run func(ctx context.Context, dir string) (float64, error)
}

// measureUpload compares uploads into volumes with copies of a file to the same storage. An upload
// is answered when its data is durable. A copy is not durable when it ends, so there are both: with
// and without waiting for storage.
func measureUpload(ctx context.Context, s settings) error {
	raw := filepath.Join(s.cache, "images", "upload.raw")
	if err := makeContent(raw, uploadSize); err != nil {
		return err
	}
	images, err := makeImages(ctx, filepath.Join(s.cache, "images"))
	if err != nil {
		return err
	}
	shell := func(name, script, file string) uploader {
		return uploader{name, func(ctx context.Context, dir string) (float64, error) {
			return runTimed(exec.CommandContext(ctx, "sh", "-c", script, "sh", file,
				filepath.Join(dir, "volume")))
		}}
	}
	files := httptest.NewServer(http.FileServer(http.Dir(filepath.Dir(images["plain"]))))
	defer files.Close()
	fetched := files.URL + "/" + filepath.Base(images["plain"])
	if s.loads.MatchString("upload, raw") {
		err := s.compareUploads(ctx, "raw, 1 GiB", append([]uploader{
			shell("cat FILE >VOLUME", `cat "$1" >"$2"`, raw),
			shell("cat FILE >VOLUME; sync VOLUME", `cat "$1" >"$2" && sync "$2"`, raw),
		}, s.uploaders(raw)...))
		if err != nil {
			return err
		}
	}
	if !s.loads.MatchString("upload, qcow2") {
		return nil
	}
	return s.compareUploads(ctx, "qcow2, 1.25 GiB", append([]uploader{
		shell("curl into a file", `curl -sS -o "$2" "$1"`, fetched),
		shell("curl into a file; sync", `curl -sS -o "$2" "$1" && sync "$2"`, fetched),
	}, s.uploaders(images["plain"])...))
}

// uploaders upload a file until its LUN can be read.
func (s settings) uploaders(file string) []uploader {
	all := []uploader{{"curl -T", s.uploaded("curl", file)},
		{"kubevirt-disk upload", s.uploaded("kubevirt-disk", file)}}
	if earlier, ok := s.earlier(); ok {
		for _, u := range earlier.uploaders(file) {
			all = append(all, uploader{u.name + ", " + beforeName, u.run})
		}
	}
	return all
}

// compareUploads prints a table. The others are compared with the first two.
func (s settings) compareUploads(ctx context.Context, what string, all []uploader) error {
	times := make([][]usage, len(all))
	for round := range s.rounds {
		for turn := range all {
			i := (round + turn) % len(all)
			dir, err := os.MkdirTemp(s.cache, "upload-")
			if err != nil {
				return err
			}
			settle()
			seconds, err := all[i].run(ctx, dir)
			if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
				return fmt.Errorf("%s: %w", all[i].name, err)
			}
			times[i] = append(times[i], usage{wall: seconds})
		}
		fmt.Fprintf(os.Stderr, "bench: upload of %s: round %d of %d\n", what, round+1, s.rounds)
	}
	out := table{head: []string{what, "time", "speed to without sync", "speed to with sync"}}
	wall := func(u usage) float64 { return u.wall }
	for i, u := range all {
		out.add(u.name, fmt.Sprintf("%.0f ms", median(column(times[i], wall))*1e3),
			pairedRatio(times[0], times[i], wall), pairedRatio(times[1], times[i], wall))
	}
	out.print(os.Stdout)
	return nil
}

func runTimed(cmd *exec.Cmd) (seconds float64, err error) {
	begin := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", cmd, err, strings.TrimSpace(string(out)))
	}
	return time.Since(begin).Seconds(), err
}

// uploaded uploads a file into a new volume, with curl or with our command, until the LUN can be
// read.
func (s settings) uploaded(by, file string) func(context.Context, string) (float64, error) {
	return func(ctx context.Context, dir string) (seconds float64, err error) {
		disks := filepath.Join(dir, "disk")
		if err := os.Mkdir(disks, 0o755); err != nil {
			return 0, err
		}
		d, err := peers.StartDaemon(peers.DaemonOptions{Binary: s.server, DiskDir: disks,
			StateDir: dir, Env: map[string]string{"VOLUMES_LISTEN": "127.0.0.1:0"}})
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, d.Kill()) }()
		volume := ""
		for _, entry := range d.Log() {
			if address, ok := entry["address"].(string); ok && entry["msg"] == "volumes" {
				volume = "http://" + address + "/volume/vm1"
			}
		}
		cmd := exec.CommandContext(ctx, "curl", "-sS", "-f", "-H", "Accept: application/json",
			"-o", filepath.Join(dir, "answer"), "-T", file, volume+"/data")
		if by != "curl" {
			cmd = exec.CommandContext(ctx, s.server, "upload", file, volume)
		}
		begin := time.Now()
		if _, err := runTimed(cmd); err != nil {
			return 0, err
		}
		if err := readVolume(volume, d.Portals[0]); err != nil {
			return 0, err
		}
		return time.Since(begin).Seconds(), nil
	}
}

// readVolume reads the first 4 KiB of a volume's LUN.
func readVolume(volume, portal string) error {
	request, err := http.NewRequest(http.MethodGet, volume, nil)
	if err != nil {
		return err
	}
	request.Header.Set("Accept", "application/json")
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	var v api.Volume
	if err := json.NewDecoder(answer.Body).Decode(&v); err != nil {
		return err
	}
	if v.ISCSI == nil {
		return fmt.Errorf("the volume is %s, and is no LUN", v.Info.State)
	}
	addr, err := net.ResolveTCPAddr("tcp", portal)
	if err != nil {
		return err
	}
	session, err := targettest.Login(addr, targettest.LoginOptions{Target: v.ISCSI.Portal})
	if err != nil {
		return err
	}
	defer session.Close()
	if _, err := session.ClearAttention(v.ISCSI.LUN); err != nil {
		return err
	}
	r, err := session.Do(targettest.Read10(v.ISCSI.LUN, 0, 8))
	if err == nil && !r.Good() {
		err = fmt.Errorf("reading LUN %d: %v", v.ISCSI.LUN, r.Sense)
	}
	return err
}
