package target

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/internal/pdu"
)

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
