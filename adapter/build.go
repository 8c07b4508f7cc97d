package adapter

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"kubevirt.io/disk/adapter/ext4"
	"kubevirt.io/disk/internal/osfile"
)

// Image is a container image.
type Image struct {
	Config []byte  // JSON (image-spec, config.md)
	Layers []Layer // the lowest first
}

// Layer is a layer of an image.
type Layer struct {
	Digest string // of its blob; for messages
	DiffID string // of its tar archive: sha256 and 64 digits
	// Open returns the uncompressed archive. A read returns io.EOF only if the digest is DiffID.
	// Several layers are opened at once, in different goroutines, before they are read.
	Open func(ctx context.Context) (io.ReadCloser, error)
}

// Options are the options of Build. The zero value works.
type Options struct {
	// Size is the least size of the disk in bytes. It is rounded up to 1 MiB. The file system takes
	// as much of it as it needs, and a guest can grow it to the rest.
	Size int64
	// Extra is JSON that is stored with the configuration. It may be nil.
	Extra json.RawMessage
	// MaxBytes bounds the size of all layers together when expanded. 0: 64 GiB.
	MaxBytes int64
	// MaxFiles bounds the files of all layers, including those that a higher layer removes. 0:
	// 1,048,576.
	MaxFiles int
	// Progress is called from time to time with a layer, counted from 0, and the number of bytes
	// read of its archive. The first call is with 0 bytes, before the layer arrives. It may be nil.
	Progress func(layer int, done int64)
}

// Disk is what Build made.
type Disk struct {
	Path   string  // of the top level
	Levels []Level // the lowest first; the last one is the top level
	Size   int64   // of the disk, bytes
}

// Level is a qcow2 file of a disk.
type Level struct {
	File    string // its name in the directory
	ChainID string // of the layers up to this one; "": not the level of a layer
	Bytes   int64  // of the file
	Cached  bool   // it existed before Build
}

const (
	// ConfigOffset is the place of the configuration on the disk, in bytes: the JSON of a Config,
	// then zeros. It is not a file in the file system: a guest reads it before it mounts anything.
	ConfigOffset = ext4.BootOffset
	// MaxConfig is the room for the configuration, in bytes.
	MaxConfig = ext4.BootSize

	defaultMaxBytes = 64 << 30
	defaultMaxFiles = 1 << 20
	sizeUnit        = 1 << 20
)

// Config is the content of the top level.
type Config struct {
	Image json.RawMessage `json:"image"`           // the image's configuration
	Extra json.RawMessage `json:"extra,omitempty"` // Options.Extra
}

// Build makes the missing levels of an image in a directory, and makes the directory if it is
// missing. A level gets its name when it is complete and on storage, so every file with such a name
// can be used. If Build fails, the next call uses the levels made so far. Build removes the
// incomplete files of killed processes.
func Build(ctx context.Context, img Image, dir string, opt Options) (*Disk, error) {
	b, err := plan(img, dir, opt)
	if err != nil {
		return nil, err
	}
	if b.shared, err = osfile.OpenShared(dir, 0o755); err != nil {
		return nil, err
	}
	defer b.shared.Close()
	b.sweep()
	if err := b.layers(ctx); err != nil {
		return nil, err
	}
	d, err := b.top(ctx)
	if err != nil {
		return nil, err
	}
	// Give the lowest level the latest time: removing a level frees nothing useful while the levels
	// above it stay.
	now := time.Now()
	for i, l := range d.Levels {
		touch(filepath.Join(dir, l.File), now.Add(-time.Duration(i)*time.Microsecond))
	}
	return d, nil
}

// builder is one call of Build.
type builder struct {
	img    Image
	dir    string
	shared *osfile.Shared // dir
	opt    Options
	config []byte  // of the top level
	levels []Level // without the top level
	// storing returns the result of giving the previous level its name. nil: no level is waiting
	// for it.
	storing chan error
}

// plan checks the input of Build, and names the levels.
func plan(img Image, dir string, opt Options) (*builder, error) {
	if opt.MaxBytes <= 0 {
		opt.MaxBytes = defaultMaxBytes
	}
	if opt.MaxFiles <= 0 {
		opt.MaxFiles = defaultMaxFiles
	}
	if opt.Progress == nil {
		opt.Progress = func(int, int64) {}
	}
	if opt.Size < 0 || opt.Size > maxSize {
		return nil, fmt.Errorf("a disk of %d bytes cannot be made: at most %d", opt.Size, maxSize)
	}
	b := &builder{img: img, dir: dir, opt: opt}
	var err error
	if b.config, err = json.Marshal(Config{img.Config, opt.Extra}); err != nil {
		return nil, fmt.Errorf("the image's configuration is not JSON: %w", err)
	}
	if len(b.config) > MaxConfig {
		return nil, fmt.Errorf("the image's configuration has %d bytes, more than %d",
			len(b.config), MaxConfig)
	}
	chain := ""
	for _, l := range img.Layers {
		digits, ok := strings.CutPrefix(l.DiffID, "sha256:")
		if sum, err := hex.DecodeString(digits); !ok || err != nil || len(sum) != sha256.Size {
			return nil, fmt.Errorf("the layer %s has the diff_id %q: only sha256 is supported",
				l.Digest, l.DiffID)
		}
		chain = chainID(chain, l.DiffID)
		b.levels = append(b.levels, Level{ChainID: chain,
			File: "layer-" + strings.TrimPrefix(chain, "sha256:") + suffix})
	}
	if len(b.levels) == 0 {
		b.levels = []Level{{File: "empty" + suffix}}
	}
	return b, nil
}

// suffix ends the names of levels. Change it whenever levels are made differently.
const suffix = ".v1.qcow2"

// maxSize is the largest qcow2 file with such small clusters, in bytes.
const maxSize = 8 << 40

// chainID names a layer together with those below it.
func chainID(below, diffID string) string {
	if below == "" {
		return diffID
	}
	sum := sha256.Sum256([]byte(below + " " + diffID))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// layers makes the levels of the layers. It reads a layer with an existing level only if a higher
// level is missing and no state was saved.
func (b *builder) layers(ctx context.Context) (err error) {
	first, last := -1, -1 // of the missing levels
	for i := range b.levels {
		there, err := b.find(&b.levels[i])
		if err != nil {
			return err
		}
		if !there {
			if last = i; first < 0 {
				first = i
			}
		}
	}
	if first < 0 {
		return nil
	}
	defer func() { err = errors.Join(err, b.stored()) }()
	a, next := b.resume(first)
	in := openAhead(ctx, b.img.Layers[next:min(last+1, len(b.img.Layers))])
	defer in.close()
	for i := next; i <= last; i++ {
		if err := b.layer(ctx, a, in, i); err != nil {
			return err
		}
		_ = b.save(ctx, i, a) // a state only saves time later
	}
	return nil
}

// find reports whether a level exists, and notes its size.
func (b *builder) find(l *Level) (bool, error) {
	info, err := os.Lstat(filepath.Join(b.dir, l.File))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case !info.Mode().IsRegular():
		return false, fmt.Errorf("%q is not a regular file: remove it",
			filepath.Join(b.dir, l.File))
	}
	l.Bytes, l.Cached = info.Size(), true
	return true, nil
}

// layer applies a layer, and writes its level if it is missing.
func (b *builder) layer(ctx context.Context, a *applier, in *archives, i int) error {
	apply := func(dst io.WriterAt) (int64, error) {
		a.fs.Begin(dst)
		if i < len(b.img.Layers) {
			if err := b.apply(ctx, a, in, i); err != nil {
				return 0, err
			}
		}
		err := a.fs.Finish()
		return a.fs.Size(), err
	}
	l := &b.levels[i]
	if l.Cached {
		_, err := apply(nil)
		return err
	}
	below := ""
	if i > 0 {
		below = b.levels[i-1].File
	}
	return b.write(ctx, l, below, apply)
}

// apply applies the archive of a layer. Reading the archive to its end verifies its digest.
func (b *builder) apply(ctx context.Context, a *applier, from *archives, i int) (err error) {
	l := b.img.Layers[i]
	defer func() {
		if err != nil && ctx.Err() == nil {
			err = fmt.Errorf("layer %d, %s: %w", i+1, l.Digest, err)
		}
	}()
	b.opt.Progress(i, 0)
	in, err := from.next()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	counted := &counter{ctx: ctx, in: in, left: a.rawLimit(),
		tell: func(n int64) { b.opt.Progress(i, n) }}
	if err := a.apply(counted); err != nil {
		// Invalid content may have been changed on its way. Read the rest, so that the digest shows
		// this.
		if _, rest := io.Copy(io.Discard, counted); rest != nil {
			return rest
		}
		return err
	}
	_, err = io.Copy(io.Discard, counted)
	return err
}

// top makes the top level.
func (b *builder) top(ctx context.Context) (*Disk, error) {
	below := b.levels[len(b.levels)-1].File
	size, err := virtualSize(filepath.Join(b.dir, below))
	if err != nil {
		return nil, err
	}
	size = max(size, (b.opt.Size+sizeUnit-1)/sizeUnit*sizeUnit)
	sum := sha256.New()
	fmt.Fprintf(sum, "%s\n%d\n", below, size)
	sum.Write(b.config)
	l := Level{File: "image-" + hex.EncodeToString(sum.Sum(nil)) + suffix}
	there, err := b.find(&l)
	if err == nil && !there {
		err = b.write(ctx, &l, below, func(dst io.WriterAt) (int64, error) {
			if err := ctx.Err(); err != nil || dst == nil {
				return size, err
			}
			whole := (len(b.config) + ext4.BlockSize - 1) / ext4.BlockSize * ext4.BlockSize
			p := append(bytes.Clone(b.config), make([]byte, whole-len(b.config))...)
			_, err := dst.WriteAt(p, ConfigOffset)
			return size, err
		})
		err = errors.Join(err, b.stored())
	}
	if err != nil {
		return nil, err
	}
	return &Disk{Path: filepath.Join(b.dir, l.File), Levels: append(b.levels, l), Size: size}, nil
}

// virtualSize reads the size of the disk from the header of a level.
func virtualSize(path string) (int64, error) {
	f, err := osfile.OpenRegular(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var head [32]byte
	if _, err := io.ReadFull(f, head[:]); err != nil {
		return 0, fmt.Errorf("%q is not a level: %w; remove it", path, err)
	}
	return int64(binary.BigEndian.Uint64(head[24:])), nil
}
