package upload

import "kubevirt.io/disk/disk/image"

// flusher brings a file to storage while more is written to it. Otherwise the end of the upload
// would have to wait for all of it.
type flusher struct {
	since int64      // how much of the file the last start covers, bytes
	done  chan error // nil: no sync is under way
}

// due reports whether it is time to start.
func (f *flusher) due(file *image.Filling) bool {
	return file.Size()-f.since >= syncEvery && (f.done == nil || len(f.done) > 0)
}

// start makes the content of the file durable, and then calls then. It returns the error of the
// previous start.
func (f *flusher) start(file *image.Filling, then func() error) error {
	if err := f.wait(); err != nil {
		return err
	}
	done := make(chan error, 1)
	f.since, f.done = file.Size(), done
	go func() {
		err := file.Sync()
		if err == nil {
			err = then()
		}
		done <- err
	}()
	return nil
}

// wait waits until no sync is running.
func (f *flusher) wait() error {
	if f.done == nil {
		return nil
	}
	err := <-f.done
	f.done = nil
	return err
}
