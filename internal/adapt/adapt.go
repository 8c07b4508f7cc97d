// Package adapt makes a disk from the container image that a reference names. It connects package
// registry, which fetches and verifies, with package adapter, which makes levels from layers. The
// command adapt uses it, and the daemon for --container-image.
package adapt

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"strings"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/cache"
	"kubevirt.io/disk/registry/transport"
)

// Options are the options of a disk that is made from an image. The zero value runs the image as it
// is.
type Options struct {
	Size    int64           // smallest size of the disk, bytes; 0: the image's
	Machine machine.Options // changes that the host makes to the image
	// Fits refuses the architecture of the image, by Go's name, before anything is made. May be
	// nil.
	Fits func(arch string) error
	// KeepDir remembers the image that a tag named first, as long as the directory exists. "":
	// nothing is remembered.
	KeepDir string
	// Progress counts how much of the layers was read. May be nil.
	Progress *registry.Progress
	// Working is called from time to time while layers are read, and once before the first read. It
	// is not called if all levels exist. May be nil.
	Working func()
}

// Made is a disk that was made from an image, by this call or an earlier one.
type Made struct {
	*adapter.Disk
	// Digest is the digest of what the reference names. If that is a list of images, Platform is
	// the digest of this machine's image, otherwise "".
	Digest, Platform string
	Arch             string // of the image, as Go names architectures
	Cached           int    // how many levels existed already
	// SignedBy is the fingerprint of the key that has signed the image. "": no signature was
	// required.
	SignedBy string
}

// Image makes a disk from an image. The levels are in dir, which is made if it is missing. Existing
// levels are used as they are.
func Image(ctx context.Context, client *registry.Client, ref transport.Reference, dir string,
	opt Options) (made *Made, err error) {
	container, err := client.Container(ctx, ref, opt.KeepDir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, container.Close()) }()
	config := container.Config()
	made = &Made{SignedBy: container.SignedBy()}
	made.Digest, made.Platform = container.Digests()
	if made.Arch, err = check(config, opt.Machine); err != nil {
		return nil, fmt.Errorf("%s: %w", ref, err)
	}
	if opt.Fits != nil {
		if err := opt.Fits(made.Arch); err != nil {
			return nil, fmt.Errorf("%s: %w", ref, err)
		}
	}
	buildOpt := adapter.Options{Size: opt.Size}
	if opt.Working != nil {
		buildOpt.Progress = func(int, int64) { opt.Working() }
	}
	if !reflect.ValueOf(opt.Machine).IsZero() {
		if buildOpt.Extra, err = json.Marshal(opt.Machine); err != nil {
			return nil, err
		}
	}
	if n := len(container.Layers()); n > maxLayers {
		return nil, fmt.Errorf("%s: it has %d layers, and a disk is made of at most %d: build it "+
			"with fewer, as by \"podman build --squash-all\"", ref, n, maxLayers)
	}
	layers := adapter.Image{Config: config}
	var total int64
	for i, l := range container.Layers() {
		total += l.Size
		layers.Layers = append(layers.Layers, adapter.Layer{Digest: l.Digest, DiffID: l.DiffID,
			Open: func(ctx context.Context) (io.ReadCloser, error) {
				return container.OpenLayer(ctx, i, opt.Progress)
			}})
	}
	if opt.Progress != nil {
		opt.Progress.Expect(total)
	}
	defer limitMemory()()
	made.Disk, err = adapter.Build(ctx, layers, dir, buildOpt)
	for try := 1; container.Again(err, try); try++ { // levels that were made stay
		made.Disk, err = adapter.Build(ctx, layers, dir, buildOpt)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", ref, err)
	}
	for _, l := range made.Levels {
		if l.Cached {
			made.Cached++
		}
	}
	return made, nil
}

// maxLayers is the most layers of an image: the most files below the configuration and the file
// that a machine writes (image.Open).
const maxLayers = 135

// memoryLimit is the heap size, in bytes, at which garbage is collected while levels are made. An
// image with a million files needs most of it. Without a limit, garbage would double it.
const memoryLimit = 192 << 20

// limitMemory sets the limit, unless a lower one is set. The returned function restores the former
// one.
func limitMemory() func() {
	before := debug.SetMemoryLimit(-1)
	if before <= memoryLimit {
		return func() {}
	}
	debug.SetMemoryLimit(memoryLimit)
	return func() { debug.SetMemoryLimit(before) }
}

// Open opens the disk of an image. Nobody removes its levels while it is open.
func (m *Made) Open() (*image.Image, error) {
	path, err := filepath.Abs(m.Path)
	if err != nil {
		return nil, err
	}
	return image.Open(path, image.Options{Hold: true, Digest: func(name string) string {
		if !adapter.IsLevel(name) {
			return ""
		}
		return levelDigest + name
	}, Alike: alike})
}

// levelDigest begins the digest by which a disk knows a level.
const levelDigest = "level:"

// alike reports whether two levels differ in the configuration only. Two top levels above the same
// levels do, so a guest's writes fit both.
func alike(now, before string) bool {
	top := func(digest string) bool {
		name, ok := strings.CutPrefix(digest, levelDigest)
		return ok && adapter.IsTop(name)
	}
	return top(now) && top(before)
}

// Others returns the levels in a directory, for the cache. They count towards its size, and the
// cache may remove those that were unused for longest.
func Others(dir string) func() ([]cache.Other, error) {
	return func() ([]cache.Other, error) {
		levels, err := adapter.List(dir)
		all := make([]cache.Other, len(levels))
		for i, l := range levels {
			all[i] = cache.Other{Name: l.Path, Bytes: l.Bytes, Used: l.Used, Remove: func() error {
				if err := l.Remove(); !errors.Is(err, adapter.ErrInUse) {
					return err
				}
				return cache.ErrInUse
			}}
		}
		return all, err
	}
}

// architectures are the architectures that have a kernel, as Go names them.
var architectures = []string{"amd64", "arm64"}

// check refuses an image that no machine can run, before anything is made from it. It returns the
// architecture in its configuration.
func check(config []byte, wishes machine.Options) (arch string, err error) {
	var c struct {
		Architecture string `json:"architecture"`
		Config       struct{ StopSignal string }
	}
	if err := json.Unmarshal(config, &c); err != nil {
		return "", fmt.Errorf("its configuration cannot be read: %w", err)
	}
	if wishes.StopSignal == "" {
		_, err = machine.ParseSignal(c.Config.StopSignal)
	} else {
		_, err = machine.ParseSignal(wishes.StopSignal)
	}
	if err != nil {
		return "", err
	}
	for _, a := range architectures {
		if c.Architecture == a {
			return a, nil
		}
	}
	return "", fmt.Errorf("it is made for %q: machines run images for amd64 and arm64",
		c.Architecture)
}

// configBlock is how much of the configuration is written at once, in bytes.
const configBlock = 4096

// Config reads the part of an image with the configuration of the machine.
func Config(img *image.Image) ([]byte, error) {
	config := make([]byte, adapter.MaxConfig)
	if _, err := img.ReadAt(context.Background(), config, adapter.ConfigOffset); err != nil {
		return nil, fmt.Errorf("the configuration of %q: %w", img.Name(), err)
	}
	return config, nil
}

// configStart is the beginning of a configuration: see adapter.Config.
const configStart = `{"image":`

// Configure gives a disk of an earlier start the image's present configuration. The disk may have
// its own copy of a former one. The guest never writes there. Only blocks that differ are written,
// so a disk with that configuration does not change. A disk that existed before the image, and has
// other data in that place, is refused.
func Configure(d disk.Disk, config []byte) error {
	before := make([]byte, len(config))
	if d.Size() >= adapter.ConfigOffset+int64(len(before)) {
		if _, err := d.ReadAt(context.Background(), before, adapter.ConfigOffset); err != nil {
			return fmt.Errorf("read its configuration: %w", err)
		}
	}
	if !bytes.HasPrefix(before, []byte(configStart)) {
		return errors.New("the disk that is there was not made of a container image: move it " +
			"away, or name another directory")
	}
	changed := false
	for at := 0; at < len(config); at += configBlock {
		block := config[at:min(at+configBlock, len(config))]
		if bytes.Equal(block, before[at:at+len(block)]) {
			continue
		}
		changed = true
		_, err := d.WriteAt(context.Background(), block, adapter.ConfigOffset+int64(at))
		if errors.Is(err, disk.ErrReadOnly) {
			return errors.New("it has its own copy of another configuration, and is read-only: " +
				"serve it once without read-only, or with the options that it had before")
		}
		if err != nil {
			return fmt.Errorf("write its configuration: %w", err)
		}
	}
	if !changed {
		return nil
	}
	return d.Flush()
}
