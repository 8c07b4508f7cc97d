package instance

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/testtool"
)

// tracedDir tells the test binary that it is the traced process, and where it works.
const tracedDir = "KUBEVIRT_DISK_TEST_TRACED"

// The process marks its progress in the trace: it looks for files with these names.
const (
	sayKept  = "kept: "  // everything must be on storage
	sayOwing = "owing: " // nothing has to be, until the next promise
	sayBound = "bound: " // the state must be true from now on
)

func syncFilesOnly(f *os.File) error {
	if st, err := f.Stat(); err != nil || st.IsDir() {
		return err
	}
	return f.Sync()
}

// flushUnsyncedMap does what a flush does when it is killed before it syncs the map: the data is on
// storage, and the durable map equals the live one, but only in the page cache.
func flushUnsyncedMap(t *testing.T, inst *Instance) {
	data := testtool.Must(os.OpenFile(inst.dir.disk(), os.O_RDWR, 0))(t)
	require.NoError(t, data.Sync())
	require.NoError(t, data.Close())
	live := filetest.Content(t, inst.dir.liveMap())
	durable := testtool.Must(os.OpenFile(inst.dir.durableMap(), os.O_RDWR, 0))(t)
	require.NoError(t, testtool.Err(durable.WriteAt(live[mapHeaderSize:], mapHeaderSize)))
	require.NoError(t, durable.Close())
}

func say(what string) { _ = unix.Access(what, unix.F_OK) }

// TestKeepPromises is the process that TestPromisesReachStorage traces. It makes disks durable in
// every possible way.
func TestKeepPromises(t *testing.T) {
	dir := os.Getenv(tracedDir)
	if dir == "" {
		t.Skip("is run by TestPromisesReachStorage")
	}
	image := filepath.Join(dir, "disk.raw")
	use := func(promise string, opt Options, write bool) {
		inst, _ := start(t, image, opt)
		if inst.copies != nil {
			inst.copies.done.Wait() // even if nothing is copied, the image is identified
			if opt.Mode == CopyClone && promise != sayOwing {
				say(sayKept + "a clone that is complete")
			}
		}
		if write {
			filetest.Write(t, inst, filetest.Block('w', 8192), 512)
			require.NoError(t, inst.Flush())
			require.NoError(t, inst.Store().Save("mode-pages", []byte("kept")))
		}
		say(promise)
		require.NoError(t, inst.Close())
	}
	places := Homes{Base: filepath.Join(dir, "places")} // of disks that nobody flushes
	require.NoError(t, places.Made("disk.raw", dir, filepath.Join(dir, "chosen", "disk.raw")))
	say(sayKept + "where a disk lies")
	for _, mode := range []CopyMode{CopyOnWrite, CopyClone} {
		volume := Options{Mode: mode, PersistentDir: filepath.Join(dir, "volume", string(mode))}
		use(sayKept+"a new persistent disk, "+string(mode), volume, true)
		volume.Size = 32 << 20
		use(sayKept+"a larger one", volume, false)
		if mode == CopyOnWrite {
			inst, _ := start(t, image, volume)
			filetest.Write(t, inst, filetest.Block('k', 8192), 2<<20)
			flushUnsyncedMap(t, inst)
			require.NoError(t, inst.Close())
			inst, _ = start(t, image, volume)
			require.NoError(t, inst.Flush())
			say(sayKept + "what an earlier process wrote and did not flush")
			say(sayOwing)
			unit := inst.Store()
			kept := unit.Where("mode-pages")
			require.NoError(t, os.MkdirAll(filepath.Dir(kept), 0o700))
			require.NoError(t, durable.Replace(nil, kept,
				[]byte("killed before the name is synced"), "", syncFilesOnly))
			content := filetest.Content(t, inst.dir.state())
			require.NoError(t, inst.Close())
			require.NoError(t, durable.Replace(nil, inst.dir.state(), content, "", syncFilesOnly))
			inst, _ = start(t, image, volume)
			say(sayKept + "what an earlier process gave its name")
			require.NoError(t, inst.Close())
		}

		pod := Options{Mode: mode, WorkDir: filepath.Join(dir, string(mode))}
		say(sayOwing)
		use(sayOwing, pod, true)
		say(sayBound)
		pod.Durable = true
		use(sayKept+"a disk that is durable from now on, "+string(mode), pod, true)
		pod.Durable = false
		use(sayKept+"a disk that says that it is not any more", pod, false)
	}
}

// TestPromisesReachStorage checks the system calls of a process that makes disks durable, as if the
// power failed: a write counts once the file is synced, and a name once its directory is. Each
// state must be true before it is put in place.
func TestPromisesReachStorage(t *testing.T) {
	strace, err := exec.LookPath("strace")
	testtool.Needs(t, "strace", err == nil)
	testtool.Needs(t, "the right to trace a process",
		exec.Command(strace, "-o", os.DevNull, "true").Run() == nil)
	dir := testtool.Must(filepath.EvalSymlinks(t.TempDir()))(t)
	filetest.Put(t, dir, "disk.raw", filetest.Sample(3<<20, 1), 0)
	for _, mode := range []CopyMode{CopyOnWrite, CopyClone} { // the directories exist already
		require.NoError(t, os.MkdirAll(filepath.Join(dir, string(mode), "disk.raw"), 0o700))
	}
	trace := filepath.Join(t.TempDir(), "trace")
	child := exec.Command(strace, "-f", "-qq", "-y", "-s", "0", "-e", "signal=none", "-o", trace,
		"-e",
		"trace=openat,mkdirat,write,pwrite64,ftruncate,fallocate,copy_file_range,fsync,fdatasync,"+
			"renameat,renameat2,unlinkat,faccessat",
		os.Args[0], "-test.run=^TestKeepPromises$")
	child.Env = append(os.Environ(), tracedDir+"="+dir)
	out, err := child.CombinedOutput()
	require.NoError(t, err, string(out))
	text := filetest.Content(t, trace)
	s := &syncedFiles{t: t, dir: dir, changes: map[string]int{}, stored: map[string]int{},
		bound: true}
	begun, syncing := map[string]string{}, map[string]int{}
	for line := range bytes.Lines(text) {
		thread, call, _ := strings.Cut(strings.TrimSpace(string(line)), " ")
		call = strings.TrimSpace(call)
		if first, cut := strings.CutSuffix(call, " <unfinished ...>"); cut {
			begun[thread], syncing[thread] = first, s.changes[descriptor(first)]
			continue
		}
		until := s.changes[descriptor(call)]
		if _, rest, resumed := strings.Cut(call, " resumed>"); resumed && strings.HasPrefix(call,
			"<... ") {
			call, until = begun[thread]+rest, syncing[thread]
		}
		s.follow(call, until)
	}
	require.Equal(t, 12, s.promises)
}

// syncedFiles tracks files below a directory by the system calls that change them.
type syncedFiles struct {
	t        *testing.T
	dir      string
	changes  map[string]int // of a file, or of the names in a directory
	stored   map[string]int // how many of them are on storage
	bound    bool
	promises int
}

var (
	calledOn = regexp.MustCompile(`^(\w+)\(\d+<([^>]*)>`)
	failed   = regexp.MustCompile(`\) += -1 `)
	// in a directory, which counts if the name is relative
	named = regexp.MustCompile(`(?:<([^>]*)>, )?"([^"]*)"`)
)

// descriptor returns the file name of a call's descriptor, if it has one.
func descriptor(call string) string {
	if m := calledOn.FindStringSubmatch(call); m != nil {
		return m[2]
	}
	return ""
}

// follow records a call. A sync stores the changes from before it began.
func (s *syncedFiles) follow(call string, until int) {
	name, _, _ := strings.Cut(call, "(")
	var paths []string
	for _, m := range named.FindAllStringSubmatch(call, -1) {
		if !filepath.IsAbs(m[2]) && strings.HasPrefix(m[1], s.dir) {
			m[2] = filepath.Join(m[1], m[2])
		}
		paths = append(paths, m[2])
	}
	if name == "faccessat" {
		s.hear(paths[0])
		return
	}
	if failed.MatchString(call) {
		return
	}
	switch name {
	case "openat":
		if _, known := s.changes[paths[0]]; !known && strings.Contains(call, "O_CREAT") {
			s.change(paths[0])
			s.rename(paths[0])
		}
	case "mkdirat":
		s.rename(paths[0])
	case "renameat", "renameat2":
		from, to := paths[0], paths[1]
		if s.bound {
			require.Empty(s.t, s.missing(from), "%s gets its name", to)
			if isState(to) || filepath.Ext(to) == ".map" {
				require.Empty(s.t, s.claimed(), "%s says that it is there", to)
			}
		}
		s.changes[to], s.stored[to] = s.changes[from], s.stored[from]
		s.forget(from)
		s.rename(to)
	case "unlinkat":
		s.forget(paths[0])
	case "fsync", "fdatasync":
		s.stored[descriptor(call)] = until
	default:
		s.change(descriptor(call))
	}
}

// change records a change that matters. The live map is worthless after a restart of the machine.
// The lock and a spare never matter.
func (s *syncedFiles) change(path string) {
	if strings.HasPrefix(path, s.dir) && !strings.HasSuffix(path, durable.LockName) &&
		!strings.Contains(path, ".live") && !strings.HasSuffix(path, durable.SpareSuffix) {
		s.changes[path]++
	}
}

func (s *syncedFiles) forget(path string) {
	delete(s.changes, path)
	delete(s.stored, path)
}

// rename records the new name of a file, unless that name does not count yet.
func (s *syncedFiles) rename(path string) {
	if !strings.HasSuffix(path, durable.LockName) && !strings.Contains(path, ".live") &&
		!strings.HasSuffix(path, durable.PartialSuffix) &&
		!strings.HasSuffix(path, durable.SpareSuffix) {
		s.change(filepath.Dir(path))
	}
}

// missing returns the files of that name, or all files, that would lose something now.
func (s *syncedFiles) missing(path string) (missing []string) {
	for name, n := range s.changes {
		if s.stored[name] < n &&
			(name == path || path == "" && !strings.HasSuffix(name, durable.PartialSuffix)) {
			missing = append(missing, name)
		}
	}
	return missing
}

// claimed returns the files that would lose something a state or a map claims. For a disk with a
// map only the next flush makes the claim. A state claims only itself.
func (s *syncedFiles) claimed() []string {
	return slices.DeleteFunc(s.missing(""),
		func(name string) bool { return s.changes[name+".map"] > 0 || isState(name) })
}

func isState(name string) bool {
	return filepath.Ext(name) == ".state" || filepath.Base(name) == stateName
}

func (s *syncedFiles) hear(what string) {
	switch {
	case strings.HasPrefix(what, sayKept):
		require.Empty(s.t, s.missing(""), what)
		s.bound, s.promises = true, s.promises+1
	case what == sayOwing:
		s.bound = false
	case what == sayBound:
		s.bound = true
	}
}

// TestHomesBehindALink: the work directory may be below a link, as /var/run is one, and may be
// missing.
func TestHomesBehindALink(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Symlink(".", filepath.Join(dir, "link")))
	h := Homes{Base: filepath.Join(dir, "link", "run", "work")}
	fast := filepath.Join(dir, "fast", "a")
	require.NoError(t, h.Made("a", filepath.Join(h.Base, "a"), fast))
	require.Equal(t, fast, testtool.Must(h.recall("a"))(t).Dir)
}
