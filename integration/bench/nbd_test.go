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
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/bench/guests"
	"kubevirt.io/disk/internal/testtool"
)

// TestImageServers compares the data that the servers of images send with the output of `qemu-img
// convert`.
func TestImageServers(t *testing.T) {
	testtool.Need(t, "qemu-img", "qemu-nbd", "qemu-storage-daemon")
	dir := t.TempDir()
	s := settings{server: filepath.Join(dir, "kubevirt-disk"), cache: dir,
		length: 50 * time.Millisecond}
	buildServer(t, s.server)

	const size = 16 << 20
	source, image, raw := filepath.Join(dir, "source.raw"), filepath.Join(dir, "disk.qcow2"),
		filepath.Join(dir, "disk.raw")
	require.NoError(t, os.WriteFile(source, compressible(size), 0o644))
	for _, args := range [][]string{{"convert", "-c", "-f", "raw", "-O", "qcow2", source, image},
		{"convert", "-O", "raw", image, raw}} {
		out, err := exec.Command("qemu-img", args...).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	want := testtool.Must(os.ReadFile(raw))(t)
	load := testtool.Must(coldLoad(image, 16))(t)

	for _, c := range s.imageServers() {
		t.Run(c.name, func(t *testing.T) {
			require.Positive(t, testtool.Must(s.coldRate(t.Context(), c, image, 16))(t))

			url, stop := testtool.Must2(c.start(image, t.TempDir()))(t)
			defer func() { require.NoError(t, stop()) }()
			url, finish := listenIn(t, url)
			conn := testtool.Must(connect(url, 0, load, silence))(t)
			turns := 0
			done := testtool.Must(conn.run(func() bool { turns++; return turns > 500 }))(t)
			require.NoError(t, conn.close())
			got := answers(t, url, finish)
			require.Greater(t, len(got), 100)
			require.EqualValues(t, len(got), done)
			for offset, data := range got {
				require.True(t, bytes.Equal(want[offset:offset+4096], data), "the bytes at %d",
					offset)
			}
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

// listenIn stands between one client and a server. finish returns the bytes that each has sent.
func listenIn(t *testing.T, url string) (between string, finish func() (sent, received []byte)) {
	network, address := "unix", strings.TrimPrefix(url, nbdScheme)
	own := filepath.Join(t.TempDir(), "between")
	between = nbdScheme + own
	if address == url {
		portal, name := testtool.Must2(parseURL(url))(t)
		network, address, own = "tcp", portal, "127.0.0.1:0"
		between = "/" + name + "/1"
	}
	l := testtool.Must(net.Listen(network, own))(t)
	t.Cleanup(func() { l.Close() })
	if network == "tcp" {
		between = "iscsi://" + l.Addr().String() + between
	}
	var said [2]bytes.Buffer
	ended := make(chan error, 2)
	go func() {
		client, err := l.Accept()
		if err != nil {
			ended <- err
			return
		}
		server, err := net.Dial(network, address)
		if err != nil {
			ended <- err
			return
		}
		relay := func(to, from net.Conn, log io.Writer) {
			_, err := io.Copy(io.MultiWriter(log, to), from)
			to.Close() // the other direction ends, too
			ended <- err
		}
		go relay(server, client, &said[0])
		relay(client, server, &said[1])
	}()
	return between, func() (sent, received []byte) {
		<-ended // the first to end closes the other's connection; its error does not matter
		<-ended
		return said[0].Bytes(), said[1].Bytes()
	}
}

// answers returns the data that was read, by address.
func answers(t *testing.T, url string, finish func() (sent, received []byte)) map[uint64][]byte {
	sent, received := finish()
	all := make(map[uint64][]byte)
	if strings.HasPrefix(url, nbdScheme) {
		for b := received[nbdGreeting+nbdExport:]; len(b) > 0; b = b[nbdReplyLen+4096:] {
			all[binary.BigEndian.Uint64(b[8:])] = b[nbdReplyLen : nbdReplyLen+4096]
		}
		return all
	}
	each := func(b []byte, f func(h, data []byte)) {
		for len(b) > 0 {
			n := int(b[5])<<16 | int(b[6])<<8 | int(b[7])
			f(b[:headerLen], b[headerLen:headerLen+n])
			b = b[headerLen+(n+3)&^3:]
		}
	}
	asked := make(map[uint32][]uint64) // addresses by task tag
	each(sent, func(h, _ []byte) {
		if h[0] == opCommand && h[32] == 0x88 {
			tag := binary.BigEndian.Uint32(h[16:])
			asked[tag] = append(asked[tag], binary.BigEndian.Uint64(h[34:])*512)
		}
	})
	each(received, func(h, data []byte) {
		if h[0] == opDataIn {
			tag := binary.BigEndian.Uint32(h[16:])
			require.NotEmpty(t, asked[tag])
			all[asked[tag][0]] = data
			asked[tag] = asked[tag][1:]
		}
	})
	return all
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
