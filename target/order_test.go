package target_test

import (
	"context"
	"fmt"
	"math/rand"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest"
	"kubevirt.io/disk/target/internal/pdu"
	tt "kubevirt.io/disk/target/targettest"
)

// sentRequest is a request of a disorderly initiator.
type sentRequest struct {
	msg       tt.Message
	data      []byte
	tag, sn   uint32
	immediate bool
	manages   bool   // a task management request
	rejected  bool   // the target must reject it
	aborts    uint32 // the tag of the command that it aborts; 0: it covers all with lower numbers
}

func (q *sentRequest) command() bool {
	_, ok := q.msg.(*pdu.SCSICommand)
	return ok
}

// disorder is an initiator that sends numbered requests in any order, and task management ahead of
// the commands that it covers.
type disorder struct {
	*tt.Session
	lun  uint64
	rand *rand.Rand

	open map[uint32]*sentRequest // by tag; no answer yet
	gone map[uint32]bool         // tags of commands that the target has reported aborted
}

// round fills the command window or a part of it, and waits until every request has an answer or is
// reported aborted.
func (d *disorder) round() error {
	var numbered, immediate []*sentRequest
	for range 1 + d.rand.Intn(int(d.MaxCmdSN-d.CmdSN)+1) {
		q := &sentRequest{tag: d.NewTag(), sn: d.CmdSN}
		d.CmdSN++
		d.compose(q)
		numbered = append(numbered, q)
		if q.command() && d.rand.Intn(6) == 0 {
			immediate = append(immediate, d.manage(pdu.TMAbortTask, q))
		}
		if d.rand.Intn(4) == 0 {
			immediate = append(immediate,
				d.manage([]pdu.TMFunction{pdu.TMAbortTaskSet, pdu.TMLogicalUnitReset,
					pdu.TMClearTaskSet}[d.rand.Intn(3)], nil))
		}
	}
	all := numbered
	if d.rand.Intn(2) == 0 {
		d.rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	}
	for _, q := range immediate { // before the requests that it does not cover
		end := slices.IndexFunc(all, func(o *sentRequest) bool {
			return !o.immediate && !pdu.SNLess(o.sn, q.sn)
		})
		if end < 0 {
			end = len(all)
		}
		all = slices.Insert(all, d.rand.Intn(end+1), q)
	}
	d.open, d.gone = make(map[uint32]*sentRequest), make(map[uint32]bool)
	for _, q := range all {
		d.open[q.tag] = q
		if err := d.Send(q.msg, q.data); err != nil {
			return err
		}
	}
	for len(d.open) > 0 {
		p, err := d.Receive()
		if err == nil {
			err = d.take(p)
		}
		if err != nil {
			return fmt.Errorf("with %d requests without an answer: %w", len(d.open), err)
		}
	}
	return nil
}

// compose makes a random numbered request.
func (d *disorder) compose(q *sentRequest) {
	command := &pdu.SCSICommand{Final: true, LUN: d.lun, TaskTag: q.tag, CmdSN: q.sn}
	q.msg = command
	switch block := byte(d.rand.Intn(100)); d.rand.Intn(8) {
	case 0:
		q.rejected = true
		q.msg = &pdu.TextRequest{Final: true, TaskTag: q.tag, TransferTag: 77, CmdSN: q.sn}
	case 1:
		q.manages = true
		q.msg = &pdu.TaskManagementRequest{Function: pdu.TMLogicalUnitReset, LUN: d.lun,
			TaskTag: q.tag, RefTaskTag: pdu.ReservedTag, CmdSN: q.sn}
	case 2, 3:
		command.Write, command.ExpectedLength = true, 8192
		copy(command.CDB[:], []byte{0x2a, 5: block, 8: 16})
		q.data = make([]byte, 4096*d.rand.Intn(2))
	case 4, 5:
		command.Read, command.ExpectedLength = true, 20<<10
		copy(command.CDB[:], []byte{0x28, 5: block, 8: 40})
	case 6:
		q.msg = &pdu.NOPOut{TaskTag: q.tag, TransferTag: pdu.ReservedTag, CmdSN: q.sn}
	default: // TEST UNIT READY
	}
}

// manage makes an immediate task management request that covers one command, or all that have a
// number so far.
func (d *disorder) manage(f pdu.TMFunction, one *sentRequest) *sentRequest {
	r := &pdu.TaskManagementRequest{Immediate: true, Function: f, LUN: d.lun, TaskTag: d.NewTag(),
		RefTaskTag: pdu.ReservedTag, CmdSN: d.CmdSN}
	q := &sentRequest{msg: r, tag: r.TaskTag, sn: d.CmdSN, immediate: true, manages: true}
	if one != nil {
		r.RefTaskTag, r.RefCmdSN, q.aborts = one.tag, one.sn, one.tag
	}
	return q
}

// take handles a PDU of the target.
func (d *disorder) take(p *tt.PDU) error {
	op, tag := p.Header.Opcode(), p.Header.TaskTag()
	switch {
	case op == pdu.OpNOPIn && tag == pdu.ReservedTag: // the window has opened
		return nil
	case op == pdu.OpReject:
		h := pdu.Header(p.Data[:pdu.HeaderLen])
		tag = h.TaskTag()
		// more task management than can wait
		full := pdu.RejectReason(p.Header[2]) == pdu.RejectImmediate
		if q := d.open[tag]; q == nil || !q.rejected && !(full && q.manages) {
			return fmt.Errorf("a %v was rejected: %v", h.Opcode(), pdu.RejectReason(p.Header[2]))
		}
		delete(d.open, tag)
		return nil
	case d.gone[tag]:
		return fmt.Errorf("%v for a command that was reported aborted", op)
	}
	q := d.open[tag]
	if q == nil || q.rejected {
		return fmt.Errorf("a stray %v", op)
	}
	switch op {
	case pdu.OpR2T:
		r, err := tt.As[pdu.R2T](p)
		if err != nil {
			return err
		}
		return d.Send(&pdu.DataOut{Final: true, LUN: r.LUN, TaskTag: tag,
			TransferTag: r.TransferTag, BufferOffset: r.BufferOffset},
			make([]byte, r.DesiredLength))
	case pdu.OpDataIn:
		if in, err := tt.As[pdu.DataIn](p); err != nil || !in.HasStatus {
			return err
		}
	case pdu.OpTaskManagementResponse:
		if err := d.managed(q, pdu.TMResponse(p.Header[2])); err != nil {
			return err
		}
	}
	delete(d.open, tag)
	return nil
}

// managed notes the commands that a task management function has ended.
func (d *disorder) managed(q *sentRequest, r pdu.TMResponse) error {
	_, open := d.open[q.aborts]
	switch {
	case q.aborts != 0 && r == pdu.TMTaskNotExist && !open:
		return nil // it was answered
	case r != pdu.TMComplete:
		return fmt.Errorf("task management: %v", r)
	case q.aborts != 0 && !open && !d.gone[q.aborts]:
		return fmt.Errorf("a command that was answered is reported aborted")
	}
	for tag, o := range d.open {
		if o.command() && (tag == q.aborts || q.aborts == 0 && pdu.SNLess(o.sn, q.sn)) {
			d.gone[tag] = true
			delete(d.open, tag)
		}
	}
	return nil
}

// disorderly logs in, in some cases with numbers that wrap around soon.
func disorderly(s *server, lun uint16, initiator int, r *rand.Rand) (*disorder, error) {
	c, err := tt.Login(s.addr,
		tt.LoginOptions{Initiator: fmt.Sprintf("iqn.2026-01.test:disorder-%d", initiator),
			CmdSN: 1<<32 - 20})
	if err != nil {
		return nil, err
	}
	return &disorder{Session: c, lun: tt.LUN(lun), rand: r}, nil
}

// slowDown gives the disks of a server a speed: as fast as memory, slow, or so slow that a reader
// loses its role.
func slowDown(s *server, kind int) {
	for _, d := range s.disks {
		d.Inject(disktest.Rule{Op: disktest.OpRead,
			Delay: time.Duration(kind%3) * 12 * time.Millisecond})
		d.Inject(disktest.Rule{Op: disktest.OpWrite,
			Delay: time.Duration(kind%2) * time.Millisecond})
	}
}

// TestRequestsInAnyOrder sends requests ahead of their turn, among them rejected ones and task
// management, in narrow and wide command windows. Each gets one answer, or none after it was
// reported aborted, and nobody waits for ever.
func TestRequestsInAnyOrder(t *testing.T) {
	for seed := range 24 {
		s := start(t, func(o *options) {
			o.Limits.CommandWindow = []int{1, 2, 3, 40}[seed%4]
		})
		slowDown(s, seed)
		var wg sync.WaitGroup
		for i := range s.disks {
			wg.Go(func() {
				d, err := disorderly(s, uint16(1+i), i, rand.New(rand.NewSource(int64(2*seed+i))))
				for n := 0; n < 20 && err == nil; n++ {
					if pdu.SNLess(d.MaxCmdSN, d.CmdSN) {
						// commands that it knows as aborted still take the window
						_, err = d.Receive()
						continue
					}
					err = d.round()
				}
				if err != nil {
					t.Errorf("seed %d: %v", seed, err)
				}
			})
		}
		wg.Wait()
	}
}

// TestEndInAnyOrder ends sessions during such requests, by reinstatement and with the server.
// Nothing is left behind.
func TestEndInAnyOrder(t *testing.T) {
	for seed := range 3 {
		s := start(t, func(o *options) {
			o.Limits.CommandWindow, o.Shared.Memory = []int{2, 40}[seed%2], 4<<20
		})
		slowDown(s, seed)
		var wg sync.WaitGroup
		var rounds sync.WaitGroup
		for i := range 4 {
			wg.Add(1)
			rounds.Add(1)
			go func() {
				defer wg.Done()
				r := rand.New(rand.NewSource(int64(4*seed + i)))
				for n := 0; ; n++ {
					if n == 20 {
						rounds.Done()
					}
					d, err := disorderly(s, 1, i%2, r)
					if err != nil && n > 20 {
						return
					}
					for err == nil && !pdu.SNLess(d.MaxCmdSN, d.CmdSN) && r.Intn(10) > 0 {
						err = d.round()
					}
				}
			}()
		}
		rounds.Wait()
		if seed == 0 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			require.NoError(t, s.Shutdown(ctx))
		} else {
			require.NoError(t, s.Close())
		}
		wg.Wait()
		require.Zero(t, s.MemoryInUse())
		all, pending := s.Connections()
		require.Zero(t, all+pending)
	}
}
