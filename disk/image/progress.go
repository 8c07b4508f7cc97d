package image

import (
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// Progress tells how much of an image has been copied, by an expansion or into a disk that is
// served meanwhile. The zero value is ready to use. Any goroutine may call every method at any
// time.
type Progress struct {
	served              atomic.Pointer[followed] // nil: use the counters below
	total, done         atomic.Int64
	dataTotal, dataDone atomic.Int64
	finished            atomic.Bool
	scarce              atomic.Bool           // see Waiting
	missed              atomic.Pointer[error] // see Missing

	making, ending sync.Once
	ended          chan struct{} // see Ended
}

// Done is how many bytes of the virtual size are finished, with holes.
func (p *Progress) Done() int64 {
	if served := p.served.Load(); served != nil {
		done, data := (*served)()
		return p.total.Load() - (data - done)
	}
	return p.done.Load()
}

// Total is the virtual size in bytes, or 0 before the expansion has begun.
func (p *Progress) Total() int64 { return p.total.Load() }

// Data is how many bytes of the image's stored data have been copied, and how many there are. The
// remaining time is estimated from these.
func (p *Progress) Data() (done, total int64) {
	if served := p.served.Load(); served != nil {
		return (*served)()
	}
	return p.dataDone.Load(), p.dataTotal.Load()
}

// Finished tells whether the disk is complete.
func (p *Progress) Finished() bool { return p.finished.Load() }

// Ended returns a channel that is closed when the disk is complete for the first time, or when the
// copying is given up.
func (p *Progress) Ended() <-chan struct{} { return p.end() }

func (p *Progress) end() chan struct{} {
	p.making.Do(func() { p.ended = make(chan struct{}) })
	return p.ended
}

// GiveUp says that the copying has ended.
func (p *Progress) GiveUp() { p.ending.Do(func() { close(p.end()) }) }

// Waiting tells whether the copying waits for space. The disk is still served.
func (p *Progress) Waiting() bool { return p.scarce.Load() }

// Wait is called with true when the copying begins to wait for space, and with false when it goes
// on.
func (p *Progress) Wait(scarce bool) {
	if p != nil {
		p.scarce.Store(scarce)
	}
}

// Missing is why the last pass over the image could not copy a part of it, or nil.
// The part is tried again, and the disk is still served.
func (p *Progress) Missing() error {
	if err := p.missed.Load(); err != nil {
		return *err
	}
	return nil
}

// Missed is called with the result of each pass over the image: see Missing.
func (p *Progress) Missed(err error) { p.missed.Store(&err) }

// followed returns how much of an image's data a served disk has, and how much there is. Bytes.
type followed = func() (done, data int64)

// Follow makes p report how much of an image has been copied into a disk of that size.
func (p *Progress) Follow(size int64, served followed) {
	_, data := served()
	p.Start(size, data)
	p.served.Store(&served)
}

func (p *Progress) Start(total, data int64) {
	p.served.Store(nil)
	p.finished.Store(false)
	p.Wait(false)
	p.Missed(nil)
	p.done.Store(0)
	p.dataDone.Store(0)
	p.dataTotal.Store(data)
	p.total.Store(total)
}

func (p *Progress) add(bytes, data int64) {
	p.done.Add(bytes)
	p.dataDone.Add(data)
}

func (p *Progress) Finish() {
	p.done.Store(p.total.Load())
	p.dataDone.Store(p.dataTotal.Load())
	p.finished.Store(true)
	p.Wait(false)
	p.served.Store(nil)
	p.GiveUp()
}

// Fields returns the progress as fields for a log.
func (p *Progress) Fields(elapsed time.Duration) []zap.Field {
	done, total := p.Done(), p.Total()
	percent := 100.0
	if total > 0 {
		percent = float64(done) * 100 / float64(total)
	}
	data, dataTotal := p.Data()
	rate := float64(data) / max(elapsed.Seconds(), 1e-9)
	fields := []zap.Field{zap.Float64("percent", Tenths(percent)),
		zap.Float64("mib_per_s", Tenths(rate/(1<<20)))}
	if data > 0 {
		left := time.Duration(float64(dataTotal-data) / rate * float64(time.Second))
		fields = append(fields, zap.Duration("eta", left.Round(time.Second)))
	}
	return fields
}

// Tenths rounds to one decimal place.
func Tenths(v float64) float64 { return float64(int64(v*10+0.5)) / 10 }
