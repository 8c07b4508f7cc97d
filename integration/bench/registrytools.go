package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// pulling and pushing measure one image each, so that one round ends within two minutes.
func pulling(name string) func(*shop, context.Context) error {
	return func(r *shop, ctx context.Context) error { return r.measurePull(ctx, name) }
}

func pushing(name string) func(*shop, context.Context) error {
	return func(r *shop, ctx context.Context) error { return r.measurePush(ctx, name) }
}

// timed runs commands, and returns how long they took together.
func timed(commands ...*exec.Cmd) (seconds float64, err error) {
	begin := time.Now()
	for _, cmd := range commands {
		if err := runCommand(cmd); err != nil {
			return 0, err
		}
	}
	return time.Since(begin).Seconds(), nil
}

// measurePull prints how long it takes to make a raw file from a disk in a registry on this
// machine, with our pull and without it.
func (r *shop) measurePull(ctx context.Context, name string) error {
	if _, err := exec.LookPath("skopeo"); err != nil {
		fmt.Fprintln(os.Stderr, "bench: no skopeo: pull is not measured")
		return nil
	}
	if _, err := r.push(name, "1"); err != nil {
		return err
	}
	ref := r.address + "/vm/" + name + ":1"
	var ours []usage
	var ratios, theirs []float64
	scratch := int64(0)
	for range r.rounds {
		raw := filepath.Join(r.dir, "pulled.raw")
		u, err := expand(ctx, []string{r.server, "pull",
			"--insecure-registry=" + r.address, ref, raw}, raw)
		if err != nil {
			return err
		}
		seconds, needed, err := r.pullByTools(ctx, ref, name+".qcow2", raw)
		if err != nil {
			return err
		}
		ours, theirs = append(ours, u), append(theirs, seconds)
		ratios, scratch = append(ratios, u.wall/seconds), needed
		_ = os.Remove(raw)
	}
	out := table{head: []string{"image", "pull", "processor time", "peak memory",
		"skopeo, tar, qemu-img", "ratio", "scratch of skopeo, tar"}}
	seconds := func(value func(usage) float64) string {
		return fmt.Sprintf("%.1f s", median(column(ours, value)))
	}
	out.add(name, seconds(func(u usage) float64 { return u.wall }),
		seconds(func(u usage) float64 { return u.cpu }),
		mib(median(column(ours, func(u usage) float64 { return u.memory }))),
		fmt.Sprintf("%.1f s", median(theirs)), ratio(median(ratios), 1), mib(float64(scratch)))
	fmt.Println("From a registry on this machine to a raw file:")
	out.print(os.Stdout)
	return nil
}

// pullByTools copies an image by skopeo, unpacks its layers, and expands the disk. It returns how
// long that took, and how much scratch space it needed, in bytes.
func (r *shop) pullByTools(ctx context.Context, ref, file, raw string) (seconds float64,
	scratch int64, err error) {
	dir, err := os.MkdirTemp(r.dir, "tools-")
	if err != nil {
		return 0, 0, err
	}
	defer os.RemoveAll(dir)
	_ = os.Remove(raw)
	settle()
	copied := filepath.Join(dir, "copied")
	seconds, err = timed(exec.CommandContext(ctx, "skopeo", "copy", "--quiet", "--insecure-policy",
		"--src-tls-verify=false", "docker://"+ref, "dir:"+copied))
	if err != nil {
		return 0, 0, err
	}
	largest, err := largestFile(copied)
	if err != nil {
		return 0, 0, err
	}
	more, err := timed(exec.CommandContext(ctx, "tar", "-x", "-f", largest, "-C", dir),
		exec.CommandContext(ctx, "qemu-img", "convert", "-O", "raw",
			filepath.Join(dir, "disk", file), raw))
	if err != nil {
		return 0, 0, err
	}
	for _, kept := range []string{largest, filepath.Join(dir, "disk", file)} {
		info, err := os.Stat(kept)
		if err != nil {
			return 0, 0, err
		}
		scratch += info.Size()
	}
	return seconds + more, scratch, nil
}

// largestFile returns the layer with the disk.
func largestFile(dir string) (path string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	most := int64(-1)
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return "", err
		}
		if info.Size() > most {
			most, path = info.Size(), filepath.Join(dir, e.Name())
		}
	}
	return path, nil
}

// measurePush prints how long it takes to bring a disk into a registry on this machine, with our
// push and with buildah.
func (r *shop) measurePush(ctx context.Context, name string) error {
	if _, err := exec.LookPath("buildah"); err != nil {
		fmt.Fprintln(os.Stderr, "bench: no buildah: push is not measured")
		return nil
	}
	if r.images[name] == "" {
		return nil
	}
	var ours, theirs, ratios []float64
	for round := range r.rounds {
		settle()
		mine, others, err := r.pushBoth(ctx, name, fmt.Sprintf("%s-%d", name, round))
		if err != nil {
			return err
		}
		ours, theirs = append(ours, mine), append(theirs, others)
		ratios = append(ratios, mine/others)
	}
	out := table{head: []string{"image", "push", "buildah build, push", "ratio"}}
	out.add(name, fmt.Sprintf("%.1f s", median(ours)), fmt.Sprintf("%.1f s", median(theirs)),
		ratio(median(ratios), 1))
	fmt.Println("Into a registry on this machine:")
	out.print(os.Stdout)
	return nil
}

// pushBoth pushes with our push and with buildah into an empty registry, and removes the registry.
func (r *shop) pushBoth(ctx context.Context, name, dir string) (ours, theirs float64, err error) {
	data := filepath.Join(r.dir, dir)
	defer func() { err = errors.Join(err, os.RemoveAll(data)) }()
	address, err := startDockerRegistry(data)
	if err != nil {
		return 0, 0, err
	}
	ours, err = timed(exec.CommandContext(ctx, r.server, "push", "--base=none",
		"--insecure-registry="+address, r.images[name], address+"/vm/ours:1"))
	if err != nil {
		return 0, 0, err
	}
	settle()
	theirs, err = r.pushByBuildah(ctx, name, address+"/vm/theirs:1")
	return ours, theirs, err
}

func (r *shop) pushByBuildah(ctx context.Context, name, ref string) (seconds float64, err error) {
	dir, err := os.MkdirTemp(r.cache, "buildah-") // beside the image, so that it can be linked
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	files := filepath.Join(dir, "context")
	if err := os.Mkdir(files, 0o755); err != nil {
		return 0, err
	}
	if err := os.Link(r.images[name], filepath.Join(files, "disk.qcow2")); err != nil {
		return 0, err
	}
	text := "FROM scratch\nADD disk.qcow2 /disk/\n"
	if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(text), 0o644); err != nil {
		return 0, err
	}
	buildah := func(args ...string) *exec.Cmd {
		all := []string{"--root", filepath.Join(dir, "root"), "--runroot",
			filepath.Join(dir, "run"), "--storage-driver=vfs"}
		return exec.CommandContext(ctx, "buildah", append(all, args...)...)
	}
	tag := "localhost/" + strings.ReplaceAll(name, ".", "-") + ":1"
	return timed(buildah("build", "--quiet", "--file", filepath.Join(dir, "Dockerfile"),
		"--tag", tag, files), buildah("push", "--quiet", "--tls-verify=false", tag,
		"docker://"+ref))
}
