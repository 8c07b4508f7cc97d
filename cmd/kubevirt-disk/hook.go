package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/problems"
)

const (
	// hooksDir is the directory that KubeVirt shares between the launcher of a machine and its hook
	// sidecars. Each sidecar sees only its part.
	hooksDir = "/var/run/kubevirt-hooks"
	// pluginsDir has a directory for each plugin of KubeVirt, at the same path as in the launcher.
	// The sidecar of a plugin sees only its own.
	pluginsDir = "/var/run/kubevirt-plugin"
	// envContainer is the variable with the name of a sidecar's container.
	envContainer = "CONTAINER_NAME"
	// hookMemory is the default of --memory, in bytes: KubeVirt limits a sidecar of a machine with
	// guaranteed resources to 64 MiB.
	hookMemory = 16 << 20
)

// kubevirtHook detects whether KubeVirt runs this container as a hook or a plugin. nil: neither.
func kubevirtHook() *options.Hook {
	container := os.Getenv(envContainer)
	if container == "" || !isDirectory(hooksDir) {
		return kubevirtPlugin(pluginsDir)
	}
	return &options.Hook{Dir: hooksDir, LauncherDir: filepath.Join(hooksDir, container),
		Container: container}
}

// kubevirtPlugin finds the plugin of this container: its directory is the only one in dir. nil:
// there is none, or there are several.
func kubevirtPlugin(dir string) *options.Hook {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	if len(names) != 1 {
		return nil
	}
	own := filepath.Join(dir, names[0])
	return &options.Hook{Dir: own, LauncherDir: own, Container: names[0], Plugin: true}
}

// hook resolves --kubevirt-hook.
func (l loader) hook() *options.Hook {
	found, source := kubevirtHook(), l.Source(keyKubevirtHook)
	if source == "" {
		return found
	}
	wanted, err := settings.ParseTruth(l.Text(keyKubevirtHook))
	switch {
	case err != nil:
		l.Problems.Add(source, "%v", err)
	case !wanted:
		return nil
	case found == nil:
		if !isDirectory(hooksDir) {
			l.Problems.Add(source, "there is neither a directory %s, in which KubeVirt's launcher "+
				"looks for hooks, nor exactly one directory of a plugin in %s: mount one of them",
				hooksDir, pluginsDir)
			return nil // no launcher asks there, and a socket would make the directory
		}
		found = &options.Hook{Dir: hooksDir, LauncherDir: hooksDir}
	}
	return found
}

// useHook sets the defaults of a hook. It listens only on its sockets, needs little memory, and
// keeps its files on the mounted volume, or else in the hook's directory.
func (l loader) useHook(c *config) {
	if c.Hook = l.hook(); c.Hook == nil {
		return
	}
	if !c.metricsChosen {
		c.Pages = nil
	}
	if l.Source(keyReadyFile) == "" {
		c.ReadyFile = ""
	}
	if l.Source(keyMemory) == "" {
		c.Memory = hookMemory
	}
	l.useHookWorkDir(c, c.Hook)
	if l.Source(keyPersistentDir) == "" {
		l.findVolume(c)
	}
	if l.Source(keyCopyMode) == "" && c.PersistentDir == "" {
		c.Settings.Disk.CopyMode = instance.CopyOnWrite
	}
}

// useHookWorkDir moves the work directory to a place that a hook can write, if no setting names
// one.
func (l loader) useHookWorkDir(c *config, hook *options.Hook) {
	if hook != nil && l.Source(keyWorkDir) == "" && !canKeepFiles(c.WorkDir) {
		c.WorkDir = hook.WorkDir()
	}
}

// canKeepFiles reports whether a directory can be written, or made. The root file system may be
// read-only.
func canKeepFiles(dir string) bool {
	if _, err := os.Stat(dir); err != nil {
		return !noneFor(dir)
	}
	return unix.Access(dir, unix.W_OK|unix.X_OK) == nil
}

// findVolume looks for the claim, which becomes the persistent directory. The annotation of the
// machine says where KubeVirt mounts the claim, but the container learns of the annotation only
// when the launcher asks it. Until then any mounted volume could be the claim, or none of them: an
// admission webhook mounts volumes, too.
func (l loader) findVolume(c *config) {
	switch dir, err := durable.Read(c.Hook.Claim()); {
	case err == nil: // the machine has named it
		c.PersistentDir, c.Hook.ClaimFound = string(dir), true
		return
	case !errors.Is(err, fs.ErrNotExist):
		l.Problems.Add("--"+keyPersistentDir, "where the claim is, as the machine has said: %q %v",
			c.Hook.Claim(), err)
		return
	}
	c.Hook.ClaimFound = true
	own := []string{c.Hook.Dir, c.Images.Dir, c.Streams.CacheDir}
	if l.Source(keyWorkDir) != "" {
		own = append(own, c.WorkDir)
	}
	for _, u := range l.List(keyUsageType) {
		_, dir, _ := strings.Cut(u, "=")
		own = append(own, dir)
	}
	var err error
	if c.Hook.Volumes, err = daemon.Mounts(own); err != nil {
		l.Problems.Add("--"+keyPersistentDir, "where the claim may be mounted is unknown, so no "+
			"disk is made: start again: %v", err)
	}
}

// askForClaim waits until the launcher says where the claim is, if volumes are mounted. It keeps
// the answer in a file, because the launcher does not ask again when the container restarts. asked:
// load the settings again.
func askForClaim(ctx context.Context, c *config, launcher *daemon.Launcher, log *zap.Logger) (
	asked bool, err error) {
	if c.Hook == nil || len(c.Hook.Volumes) == 0 {
		return false, nil
	}
	log.Info("the disks are opened when KubeVirt's launcher says where the claim of this "+
		"container is", zap.Strings("volumes", c.Hook.Volumes))
	dir, said, err := launcher.Claim(ctx)
	if err == nil {
		dir, err = chooseVolume(c.Hook.Volumes, dir, said)
	}
	if err != nil {
		return false, err
	}
	log.Info("the launcher has asked for the disks", zap.String("persistent_dir", dir))
	return true, durable.Write(c.Hook.Claim(), 0o600, func(f *os.File) error {
		_, err := f.WriteString(dir)
		return err
	})
}

// chooseVolume returns the mounted volume that is the claim, by the annotation of the machine; "":
// none.
func chooseVolume(volumes []string, dir string, said bool) (string, error) {
	var p problems.List
	switch {
	case said && dir == "":
		return "", nil
	case said:
		for _, v := range volumes {
			if v == dir || options.SameDirectory(v, dir) {
				return v, nil
			}
		}
		p.Add("--"+keyPersistentDir, "the machine has the claim of this hook sidecar at %q, and "+
			"no volume that can be written is mounted there, only at %s: name one of them, or "+
			"\"\" for disks that end with the machine", dir, strings.Join(volumes, ", "))
	case len(volumes) == 1:
		return volumes[0], nil
	default:
		p.Add("--"+keyPersistentDir, "several volumes are mounted, and any of them could "+
			"be for the disks: name one of %s, or \"\" for disks that end with the machine",
			strings.Join(volumes, ", "))
	}
	return "", p.Err()
}

// tellLauncher tells KubeVirt's launcher why a hook does not serve, each time the launcher asks,
// until KubeVirt gives up the machine. It returns the reason. launcher is nil if this is no hook.
func (a *app) tellLauncher(ctx context.Context, launcher *daemon.Launcher, log *zap.Logger,
	reason error) error {
	if launcher == nil || reason == nil || ctx.Err() != nil {
		return reason
	}
	log.Error("the machine cannot start, and KubeVirt's launcher is told why",
		console.ErrorField(reason))
	if err := launcher.Refuse(ctx, errors.New(console.OnOneLine(reason.Error()))); err != nil {
		return fmt.Errorf("%w; and %w", reason, err)
	}
	return reason
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
