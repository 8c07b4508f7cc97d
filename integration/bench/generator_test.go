package main

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
)

// TestGenerate runs every kind of load against a target, and checks that the target sees all of it.
func TestGenerate(t *testing.T) {
	const size = 8 << 20
	disks := serving.New(serving.Config{})
	srv := testtool.Must(target.New(target.Options{Disks: disks}))(t)
	for n := range byte(3) {
		require.NoError(t, disks.Add(serving.Options{Number: uint16(n) + 1, Name: "bench",
			Disk: disktest.NewMemory(size), Access: serving.AccessWriteShared,
			Identity: disk.Identity{Serial: fmt.Sprint("bench-", n), NAA: [8]byte{0x30, 7: n}}}))
	}
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := testtool.Go(func() error { return srv.Serve(l) })
	t.Cleanup(func() {
		require.NoError(t, srv.Close())
		require.ErrorIs(t, <-served, target.ErrServerClosed)
	})
	url := "iscsi://" + l.Addr().String() + "/" + target.DefaultTargetName + "/1"
	for _, load := range []generatorLoad{
		{bytes: 4 << 10, depth: 1, sessions: 1, luns: 1},
		{bytes: 4 << 10, depth: 32, sessions: 4, luns: 3},
		{bytes: 4 << 10, depth: 32, sessions: 2, luns: 1, write: true},
		{bytes: 256 << 10, depth: 16, sessions: 1, luns: 1, digests: true},
		{bytes: 256 << 10, depth: 16, sessions: 1, luns: 1, write: true},
		{bytes: 256 << 10, depth: 4, sessions: 2, luns: 3, write: true, digests: true},
		{bytes: 1 << 20, depth: 4, sessions: 1, luns: 1, write: true, digests: true}, // by R2T
	} {
		t.Run(load.String(), func(t *testing.T) {
			load.size = size
			done := testtool.Must(generate(t.Context(), load, url, 50*time.Millisecond))(t)
			require.Positive(t, done.operations)
		})
	}
	conn := testtool.Must(connect(url, 0,
		generatorLoad{bytes: 4096, depth: 4, sessions: 1, luns: 1, size: size}, silence))(t)
	done := testtool.Must(conn.run(func() bool { return true }))(t)
	require.EqualValues(t, 1, done, "at least one is sent")
	require.NoError(t, conn.close())
	require.ErrorContains(t, testtool.Err(generate(t.Context(),
		generatorLoad{bytes: 4096, depth: 1, sessions: 1, luns: 4, size: size}, url,
		time.Millisecond)), "LUN 4")
	require.ErrorContains(t, testtool.Err(generate(t.Context(),
		generatorLoad{bytes: 4096, depth: 1, sessions: 1, luns: 1, size: size << 20}, url,
		50*time.Millisecond)), "status 0x2", "beyond the end")
	_, err := generate(t.Context(), generatorLoad{sessions: 1}, "http://a/b", time.Millisecond)
	require.Error(t, err)
	require.Error(t, testtool.Err2(parseURL("iscsi://127.0.0.1:3260")))
}

// TestWireGetsTheRestAtOnce lets the data of the last reply arrive in two parts. The first part is
// there before the client waits. No other data wakes the client.
func TestWireGetsTheRestAtOnce(t *testing.T) {
	l := testtool.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	client := testtool.Must(net.Dial("tcp", l.Addr().String()))(t)
	defer client.Close()
	server := testtool.Must(l.Accept())(t)
	defer server.Close()
	w := testtool.Must(newWire(client, time.Hour))(t)
	defer w.close()
	send := func(bytes int) {
		require.NoError(t, testtool.Err(server.Write(make([]byte, bytes))))
	}
	const header, much, first, second = 48, 64 << 20, 100 << 10, 50 << 10
	reply := func(bytes int) {
		send(header)
		require.NoError(t, w.receive(header, func([]byte) (int, error) { return bytes, nil }))
	}
	// While the receive window is small, the kernel wakes the client anyway.
	reply(much)
	go send(much)
	for w.skip > 0 {
		require.NoError(t, w.receive(header, nil))
	}
	reply(first + second)
	send(first)
	rest := testtool.Go(func() error { return w.receive(header, nil) })
	time.Sleep(50 * time.Millisecond) // by now it should wait; if not, nothing is tested
	send(second)
	select {
	case err := <-rest:
		require.NoError(t, err)
		require.Zero(t, w.skip)
	case <-time.After(30 * time.Second):
		require.NoError(t, server.Close())
		<-rest
		require.Fail(t, "it waits for more than there is")
	}
}
