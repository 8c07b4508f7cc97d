package target

import (
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/socket"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/target/internal/pdu"
	"kubevirt.io/disk/target/internal/scsi"
)

// TestTimeouts checks that a slow peer is told from one that is silent or dead or does not read.
// Times are in seconds.
func TestTimeouts(t *testing.T) {
	const now = 1000
	for _, c := range []struct {
		name                                    string
		pduSince, writeSince, wrote, heard, ask int64
		discovery                               bool
		want                                    error
	}{
		{name: "a peer that talks", heard: now - 1},
		{name: "a PDU that takes long", pduSince: now - 29, heard: now},
		{name: "a PDU that takes too long", pduSince: now - 31, heard: now, want: errPDUTimeout},
		{name: "a PDU while it is written", pduSince: now - 31, writeSince: now - 1,
			heard: now - 31},
		{name: "a PDU after it was written", pduSince: now - 31, wrote: now - 1, heard: now - 1},
		{name: "a PDU long after it was written", pduSince: now - 40, wrote: now - 31,
			heard: now - 31, want: errPDUTimeout},
		{name: "a write that takes long", writeSince: now - 29, heard: now - 29},
		{name: "a write that takes too long", writeSince: now - 31, heard: now,
			want: errWriteTimeout},
		{name: "a ping that waits for its answer", ask: now - 29, heard: now - 45},
		{name: "a ping without an answer", ask: now - 31, heard: now - 46, want: errPeerDead},
		{name: "a ping with an answer", ask: now - 31, heard: now - 1},
		{name: "a ping behind a long answer that is written", ask: now - 31, writeSince: now - 1,
			wrote: now - 2, heard: now - 46},
		{name: "a ping behind a long answer that was written", ask: now - 31, wrote: now - 1,
			heard: now - 46},
		{name: "a ping long after the answer was written", ask: now - 40, wrote: now - 31,
			heard: now - 46, want: errPeerDead},
		{name: "discovery", discovery: true, heard: now - 44},
		{name: "discovery, silent", discovery: true, heard: now - 46, want: errPeerDead},
		{name: "discovery, after a long answer", discovery: true, heard: now - 46, wrote: now - 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			srv := &Server{pool: noMemory()}
			require.NoError(t, srv.opt.Limits.resolve())
			_, far := net.Pipe()
			conn := srv.newConn(far)
			sess := &session{conn: conn}
			if !c.discovery {
				sess.nexus = new(scsi.Nexus)
			}
			sess.open.Store(true)
			s := int64(time.Second)
			conn.rx.Since.Store(c.pduSince * s)
			conn.rx.Heard.Store(c.heard * s)
			conn.tx.WriteSince.Store(c.writeSince * s)
			conn.tx.Wrote.Store(c.wrote * s)
			conn.ping.sentAt.Store(c.ask * s)
			conn.checkTimeouts(sess, now*s)
			require.ErrorIs(t, conn.Cause(), c.want)
		})
	}
}

// TestAPDUEndsWithItsLastByte checks that the time limit of a PDU ends with its last byte and does
// not include the time for handling it.
func TestAPDUEndsWithItsLastByte(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	var clock atomic.Int64
	clock.Store(1)
	rx := &receiver{headerDigest: true, dataDigest: true}
	rx.init(&socket.Plain{Conn: ours}, &clock)
	var within []bool // whether the reader waited within a PDU
	rx.BeforeMore = func() error { return nil }
	rx.BeforeWait = func() error {
		within = append(within, rx.Since.Load() != 0)
		return nil
	}
	packet := func(data []byte) []byte {
		var h pdu.Header
		(&pdu.NOPOut{TaskTag: 1, TransferTag: pdu.ReservedTag, DataLen: len(data)}).Encode(&h)
		b := pdu.AppendDigest(h[:], pdu.Digest(h[:]))
		if len(data) > 0 {
			b = append(b, data...)
			b = append(b, make([]byte, -len(data)&3)...)
			b = pdu.AppendDigest(b, pdu.Digest(b[pdu.HeaderLen+digestLen:]))
		}
		return b
	}
	for _, c := range []struct {
		data []byte
		cuts []int
	}{
		{nil, nil},
		{nil, []int{20}},
		{nil, []int{48}},
		{nil, []int{1, 47, 50}},
		{[]byte("hello"), nil},
		{[]byte("hello"), []int{52}},
		{[]byte("hello"), []int{54, 57, 60, 62}},
		{[]byte("data"), []int{56}},
	} {
		b := packet(c.data)
		sent := testtool.Go(func() error {
			at := 0
			for _, cut := range append(c.cuts, len(b)) {
				if _, err := theirs.Write(b[at:cut]); err != nil {
					return err
				}
				at = cut
			}
			return nil
		})
		within = nil
		require.NoError(t, testtool.Err(rx.next()))
		got := make([]byte, rx.data.n)
		require.NoError(t, rx.data.readInto(got))
		require.NoError(t, rx.data.discard())
		require.Equal(t, string(c.data), string(got))
		require.NoError(t, <-sent)
		require.Zero(t, rx.Since.Load(), "%q in pieces up to %v: it is complete", c.data, c.cuts)
		require.Len(t, within, 1+len(c.cuts))
		require.False(t, within[0], "nothing has come yet")
		require.NotContains(t, within[1:], false, "%q in pieces up to %v", c.data, c.cuts)
	}
}

// TestQuiet checks what a stop waits for before it closes a connection: for all work that ends by
// itself, and for some time for the initiator.
func TestQuiet(t *testing.T) {
	const short, long = logoutSilence, logoutGrace
	for name, c := range map[string]struct {
		executing, waiting int
		queued             bool          // PDUs wait for the network
		writing            time.Duration // how long a write has been under way; 0: none
		silent             time.Duration
		quiet              bool
	}{
		"nothing": {silent: short, quiet: true},
		"nothing, and it has just sent something": {silent: short - 1},
		"a command in the disk":                   {executing: 1, silent: 100 * long},
		"an answer to be sent":                    {queued: true, silent: 100 * long},
		"an answer being sent": {queued: true, writing: long - 1,
			silent: 100 * long},
		"an answer that is not taken": {queued: true, writing: long,
			silent: long, quiet: true},
		"an answer that is not taken, by one who sends": {queued: true, writing: long,
			silent: long - 1},
		"a command in the disk, and nothing is taken": {executing: 1, queued: true,
			writing: long, silent: long, quiet: true},
		"a command that waits for data": {waiting: 1, silent: long, quiet: true},
		"one that may get some yet":     {waiting: 1, silent: long - 1},
		"one that waits for data, and one in the disk": {waiting: 1, executing: 1,
			silent: 100 * long},
		"one that waits for data, and an answer is queued": {waiting: 1, queued: true,
			silent: 100 * long},
	} {
		t.Run(name, func(t *testing.T) {
			srv := &Server{pool: noMemory()}
			near, far := net.Pipe()
			t.Cleanup(func() { _ = near.Close(); _ = far.Close() })
			conn := srv.newConn(near)
			const now = int64(time.Hour)
			srv.clock.Store(now)
			conn.rx.Heard.Store(now - int64(c.silent))
			if c.writing > 0 {
				conn.tx.WriteSince.Store(now - int64(c.writing))
			}
			if c.queued {
				conn.tx.send(&pdu.NOPIn{}, snPeek, nil, nil)
			}
			sess := &session{conn: conn, tasks: map[uint32]*task{}}
			for range c.executing {
				sess.tasks[uint32(len(sess.tasks))] = &task{state: taskExecuting}
			}
			for range c.waiting {
				sess.tasks[uint32(len(sess.tasks))] = &task{state: taskCollecting}
			}
			require.Equal(t, c.quiet, sess.quiet())
		})
	}
}
