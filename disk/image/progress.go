package image

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// Progress tells how much of an image has been copied: by an expansion while it runs, or into a
// disk that is served meanwhile. The zero value is ready to use; every method may be called at any
// time by any goroutine.
type Progress struct {
	served              atomic.Pointer[followed] // nil: the counters below are what is known
	total, done         atomic.Int64
	dataTotal, dataDone atomic.Int64
	finished            atomic.Bool
	scarce              atomic.Bool // see Waiting
}

// Done is how many bytes of the virtual size are dealt with, holes included.
func (p *Progress) Done() int64 {
	if served := p.served.Load(); served != nil {
		done, data := (*served)()
		return p.total.Load() - (data - done)
	}
	return p.done.Load()
}

// Total is the virtual size in bytes; 0 before the expansion has begun.
func (p *Progress) Total() int64 { return p.total.Load() }

// Data is how many of the bytes that the image stores have been copied, of how many: what the
// remaining time depends on.
func (p *Progress) Data() (done, total int64) {
	if served := p.served.Load(); served != nil {
		return (*served)()
	}
	return p.dataDone.Load(), p.dataTotal.Load()
}

// Finished tells whether the disk is complete.
func (p *Progress) Finished() bool { return p.finished.Load() }

// Waiting tells whether the copying waits for space, as on a full volume. The disk is served
// meanwhile.
func (p *Progress) Waiting() bool { return p.scarce.Load() }

// Wait is called when the copying begins to wait for space, or goes on.
func (p *Progress) Wait(scarce bool) {
	if p != nil {
		p.scarce.Store(scarce)
	}
}

// followed tells how many bytes of the data of an image are in a disk that is served, of how many.
type followed = func() (done, data int64)

// Follow makes it tell what has been copied of an image into a disk of that size.
func (p *Progress) Follow(size int64, served followed) {
	_, data := served()
	p.Start(size, data)
	p.served.Store(&served)
}

func (p *Progress) Start(total, data int64) {
	p.served.Store(nil)
	p.finished.Store(false)
	p.Wait(false)
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
}

// Fields is the progress after the given time, for a log.
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

// tenths rounds to one decimal place.
func Tenths(v float64) float64 { return float64(int64(v*10+0.5)) / 10 }
