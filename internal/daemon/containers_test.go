package daemon

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/registry"
)

// TestLevelsCountInTheCache: the cache counts the levels of container images towards its size, with
// and without a directory for them.
func TestLevelsCountInTheCache(t *testing.T) {
	dir := t.TempDir()
	levels := filepath.Join(dir, "levels")
	d := &Daemon{opt: Options{Streams: Streams{CacheDir: dir},
		Containers: Containers{Dir: levels}}}
	others, err := d.othersInCache()
	require.NoError(t, err)
	require.Empty(t, others)

	require.NoError(t, os.Mkdir(levels, 0o755))
	level := filepath.Join(levels, "layer-0123.v1.qcow2")
	require.NoError(t, os.WriteFile(level, make([]byte, 1<<20), 0o644))
	others, err = d.othersInCache()
	require.NoError(t, err)
	require.Len(t, others, 1)
	require.Equal(t, level, others[0].Name)
	require.GreaterOrEqual(t, others[0].Bytes, int64(1<<20))
	require.NoError(t, others[0].Remove())
	require.NoFileExists(t, level)
}

// savedImage is a container image with one layer, as docker saves it.
func savedImage(t *testing.T) registry.Reference {
	t.Helper()
	archive := func(files ...string) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for i := 0; i < len(files); i += 2 {
			require.NoError(t, w.WriteHeader(&tar.Header{Name: files[i], Mode: 0o644,
				Size: int64(len(files[i+1]))}))
			_, err := w.Write([]byte(files[i+1]))
			require.NoError(t, err)
		}
		require.NoError(t, w.Close())
		return b.Bytes()
	}
	layer := archive("hello", "world")
	file := filepath.Join(t.TempDir(), "image.tar")
	require.NoError(t, os.WriteFile(file, archive("layer.tar", string(layer), "config.json",
		fmt.Sprintf(`{"os":"linux","architecture":"amd64","config":{"Cmd":["/hello"]},"rootfs":`+
			`{"type":"layers","diff_ids":["sha256:%x"]}}`, sha256.Sum256(layer)),
		"manifest.json", `[{"Config":"config.json","Layers":["layer.tar"]}]`), 0o644))
	ref, err := registry.ParseReference("docker-archive:" + file)
	require.NoError(t, err)
	return ref
}

// TestConversionIsLogged: the log says that a container image becomes a disk, and when it has
// become one. If its levels exist, the log says only the latter.
func TestConversionIsLogged(t *testing.T) {
	core, log := observer.New(zap.InfoLevel)
	client, err := registry.New(registry.Options{})
	require.NoError(t, err)
	defer client.Close()
	dir := t.TempDir()
	d := &Daemon{log: zap.New(core), opt: Options{WorkDir: filepath.Join(dir, "work"),
		Containers: Containers{Dir: filepath.Join(dir, "levels")}}}
	d.streams.client = client
	ref := savedImage(t)
	const begins, ends = "a container image becomes a disk",
		"a container image is served as a disk"
	for _, want := range [][]string{{begins, ends}, {ends}} {
		found, err := d.findContainer(context.Background(), ref)
		require.NoError(t, err)
		closeImages(found.image)
		var messages []string
		for _, e := range log.TakeAll() {
			messages = append(messages, e.Message)
			require.Equal(t, ref.String(), e.ContextMap()["reference"])
			_, timed := e.ContextMap()["took"]
			require.Equal(t, e.Message == ends && len(want) > 1, timed)
		}
		require.Equal(t, want, messages)
	}
}

// TestLongConversion: the log has a line every ten seconds during a long conversion.
func TestLongConversion(t *testing.T) {
	core, log := observer.New(zap.InfoLevel)
	now := time.Now()
	c := &conversion{log: zap.New(core), now: func() time.Time { return now }}
	c.read.Expect(7 << 20)
	for range 31 {
		c.tell()
		now = now.Add(time.Second)
	}
	lines := log.TakeAll()
	require.Len(t, lines, 4)
	require.Equal(t, "a container image becomes a disk", lines[0].Message)
	for _, l := range lines[1:] {
		require.Equal(t, "a container image is still becoming a disk", l.Message)
		require.EqualValues(t, 7<<20, l.ContextMap()["total_bytes"])
	}
}

// TestAnotherConfiguration: with other options the disk of a container image keeps what the guest
// wrote, and the guest finds the configuration of this start, in every copy mode.
func TestAnotherConfiguration(t *testing.T) {
	const written = 1 << 30 // where the guest writes
	for _, mode := range []instance.CopyMode{instance.CopyClone, instance.CopyOnRead,
		instance.CopyOnWrite} {
		for _, persistent := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/%t", mode, persistent), func(t *testing.T) {
				opt := options(t)
				opt.Containers.References = []registry.Reference{savedImage(t)}
				opt.Streams.CacheDir = filepath.Join(filepath.Dir(opt.WorkDir), "cache")
				opt.Streams.CacheSize = 1 << 30
				opt.Containers.Dir = filepath.Join(opt.Streams.CacheDir, "levels")
				opt.Settings.Disk.CopyMode = mode
				opt.WorkDirNamed = true
				opt.RecordBoot = filepath.Join(filepath.Dir(opt.WorkDir), "order")
				if persistent {
					opt.PersistentDir = filepath.Join(filepath.Dir(opt.WorkDir), "volume")
				}
				serial := ""
				for i, env := range []string{"A=1", "A=a longer value", "A=1", ""} {
					opt.Containers.Machine.Env = nil
					if env != "" {
						opt.Containers.Machine.Env = []string{env}
					}
					r := start(t, opt)
					s := r.Daemon.initial[0]
					inst := r.Daemon.disks.look(s).instance
					require.Empty(t, r.Daemon.record.disks[0].seen, "no guest has read")
					config := make([]byte, 4096)
					_, err := inst.ReadAt(config, machine.ConfigOffset)
					require.NoError(t, err)
					text := strings.TrimRight(string(config), "\x00")
					if env == "" {
						require.NotContains(t, text, "extra")
					} else {
						require.True(t, strings.HasSuffix(text, `"extra":{"env":["`+env+`"]}}`),
							"start %d: %s", i, text)
					}
					mine := make([]byte, 4)
					if i == 0 {
						_, err = inst.WriteAt(append([]byte("mine"), make([]byte, 508)...),
							written)
						require.NoError(t, err)
						serial = inst.Identity.Serial
					}
					_, err = inst.ReadAt(mine, written)
					require.NoError(t, err)
					require.Equal(t, "mine", string(mine), "start %d", i)
					require.Equal(t, serial, inst.Identity.Serial)
					if mode == instance.CopyClone {
						require.Eventually(t, s.progress.Finished, patience, time.Millisecond)
					}
					require.NoError(t, r.end())
				}
			})
		}
	}
}
