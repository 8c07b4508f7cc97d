package main

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/bench/guests"
	"kubevirt.io/disk/internal/testtool"
)

// TestImageServers: each server of images answers cold reads of a compressed image.
func TestImageServers(t *testing.T) {
	testtool.Need(t, "qemu-img", "qemu-nbd", "qemu-storage-daemon")
	dir := t.TempDir()
	s := settings{server: filepath.Join(dir, "kubevirt-disk"), cache: dir,
		length: 50 * time.Millisecond}
	buildServer(t, s.server)

	const size = 16 << 20
	source, image := filepath.Join(dir, "source.raw"), filepath.Join(dir, "disk.qcow2")
	require.NoError(t, os.WriteFile(source, compressible(size), 0o644))
	out, err := exec.Command("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", source,
		image).CombinedOutput()
	require.NoError(t, err, string(out))

	for _, c := range s.imageServers() {
		t.Run(c.name, func(t *testing.T) {
			require.Positive(t, testtool.Must(s.coldRate(t.Context(), c, image, 16))(t))
		})
	}
}

// compressible returns the content of a disk: blocks of a few different bytes, no two alike, and a
// quarter of zeros.
func compressible(size int) []byte {
	content, random := make([]byte, size), rand.New(rand.NewPCG(1, 2))
	for block := range size / 4096 {
		if block/16%4 == 3 {
			continue
		}
		for i := range 4096 / 8 {
			binary.LittleEndian.PutUint64(content[block*4096+i*8:],
				random.Uint64()&0x0303030303030303)
		}
	}
	return content
}

// smallExport returns the bytes from a server of 1 MiB: its greeting, and the default export.
func smallExport() []byte {
	greeting := append([]byte("NBDMAGICIHAVEOPT"), 0, nbdFixedNewstyle|nbdNoZeroes)
	return append(greeting, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0)
}

// TestLoadEndsWithItsLastByte checks that a load ends only when everything from the server has
// arrived. If the client left earlier, the server's last write would fail.
func TestLoadEndsWithItsLastByte(t *testing.T) {
	const size = 1 << 20
	load := generatorLoad{bytes: 4096, depth: 1, sessions: 1, luns: 1, size: size, step: coldStep}
	socket := filepath.Join(t.TempDir(), "nbd")
	l := testtool.Must(net.Listen("unix", socket))(t)
	defer l.Close()
	left := make(chan error, 1)
	go func() {
		nc, err := l.Accept()
		if err != nil {
			left <- err
			return
		}
		defer nc.Close()
		reply := append(binary.BigEndian.AppendUint32(nil, nbdReplyMagic),
			make([]byte, nbdReplyLen-4+4096)...)
		_, err = nc.Write(smallExport())
		if err == nil {
			_, err = io.ReadFull(nc, make([]byte, 20+28)) // the answer and a request
		}
		if err == nil {
			_, err = nc.Write(reply[:nbdReplyLen+1])
		}
		if err == nil {
			_ = nc.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
			_, err = nc.Read(make([]byte, 1))
		}
		_, _ = nc.Write(reply[nbdReplyLen+1:])
		left <- err
	}()
	conn := testtool.Must(connect(nbdScheme+socket, 0, load, silence))(t)
	done, err := conn.run(func() bool { return true }) // at least one is sent
	require.NoError(t, err)
	require.EqualValues(t, 1, done)
	require.NoError(t, conn.close())
	require.ErrorIs(t, <-left, os.ErrDeadlineExceeded, "the client did not wait for the last byte")
}

// TestColdAddresses checks that cold reads go through the whole image, each in another cluster than
// the one before, and never beyond the end.
func TestColdAddresses(t *testing.T) {
	const size = 1<<30 + 512
	a := addresses{l: generatorLoad{bytes: 4096, luns: 1, size: size, step: coldStep}}
	seen := make(map[int64]bool)
	for range size / 4096 {
		lun, offset := a.next()
		require.EqualValues(t, 1, lun)
		require.LessOrEqual(t, offset+4096, int64(size))
		require.Zero(t, offset%4096)
		seen[offset] = true
	}
	require.Len(t, seen, size/4096)
}

func TestParseFio(t *testing.T) {
	done := testtool.Must(parseFio(`load: some note
{"jobs": [{"jobname": "load", "error": 0, "read": {"total_ios": 500, "runtime": 250},
  "write": {"total_ios": 0, "runtime": 0}}]}`))(t)
	require.Equal(t, client{operations: 500, elapsed: 250 * time.Millisecond}, done)
	for text, want := range map[string]string{
		"":                                   "no JSON",
		"fio: no such engine":                "no JSON",
		`{"jobs": []}`:                       "has failed",
		`{"jobs": [{"error": 5}]}`:           "has failed",
		`{"jobs": [{"error": 0}]}`:           "done nothing",
		`{"jobs": [{"error": 0}, {"a": 1}]}`: "has failed",
	} {
		require.ErrorContains(t, testtool.Err(parseFio(text)), want, text)
	}
}

// buildServer builds our server as the Makefile does, of what is compiled for other tests anyway.
func buildServer(t *testing.T, path string) {
	t.Helper()
	build := exec.Command("go", "build", "-trimpath", "-o", path, "./cmd/kubevirt-disk")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
}

// TestNBDServers starts each server and has fio use it.
func TestNBDServers(t *testing.T) {
	testtool.Need(t, "fio", "nbdkit", "qemu-nbd")
	dir := t.TempDir()
	s := settings{server: filepath.Join(dir, "kubevirt-disk"), cache: dir}
	buildServer(t, s.server)
	images := t.TempDir()
	require.NoError(t, makeContent(filepath.Join(images, "disk.raw"), nbdSize))
	for _, one := range s.nbdServers() {
		t.Run(one.name, func(t *testing.T) {
			require.NoError(t, one.start(dir, images))
			defer func() { require.NoError(t, one.stop()) }()
			l := nbdLoads()[1]
			require.NoError(t, one.measure(t.Context(), l, 100*time.Millisecond))
			require.Positive(t, one.rates[l.name][0])
		})
	}
}

// TestVhost: guests move data by vhost-user as the tables say, and the bare loop does so without.
func TestVhost(t *testing.T) {
	testtool.Need(t, "qemu-storage-daemon", "gcc")
	dir := t.TempDir()
	var raws []string
	for _, name := range []string{"a.raw", "b.raw"} {
		raws = append(raws, filepath.Join(dir, name))
		require.NoError(t, os.WriteFile(raws[len(raws)-1], make([]byte, 8<<20), 0o600))
	}
	zeroes := func(raw string) int {
		return bytes.Count(testtool.Must(os.ReadFile(raw))(t), []byte{0})
	}
	v := vhostQEMU("QEMU", "aio=threads")
	require.NoError(t, v.begin(dir, raws))
	t.Cleanup(func() { require.NoError(t, v.stop()) })
	l := guests.Load{Write: true, Sequential: true, Bytes: 4096, Depth: 16, Queues: 2}
	r := testtool.Must(v.load(t.Context(), "writes", l, 2, 100*time.Millisecond))(t)
	require.Len(t, r.Guests, 2)
	require.Equal(t, r.Operations, r.Guests[0]+r.Guests[1])
	require.Positive(t, r.ServerTime())
	require.Len(t, v.rates["writes"], 1)
	for _, raw := range raws {
		require.Less(t, zeroes(raw), 8<<20-4096*16)
	}
	require.NoError(t, testtool.Err(guests.Idle(v.sockets[0], 0, time.Millisecond, v.pids)))
	_, err := v.load(t.Context(), "reads", guests.Load{Bytes: 16 << 20, Depth: 1}, 1,
		time.Millisecond)
	require.Error(t, err, "the disk is smaller than a request")

	require.NoError(t, os.WriteFile(raws[0], make([]byte, 1<<20), 0o600))
	floor := testtool.Must(guests.BuildFloor(dir))(t)
	l = guests.Load{Write: true, Sequential: true, Bytes: 64 << 10, Depth: 16}
	r = testtool.Must(floor.Run(t.Context(), raws[:1], l, time.Millisecond))(t)
	require.Zero(t, r.Operations%16)
	require.Positive(t, r.Servers)
	require.Zero(t, zeroes(raws[0]), "all of the file is written")
}
