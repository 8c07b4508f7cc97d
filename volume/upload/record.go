package upload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
)

// The files of an upload. Their names begin with that of the volume's disk.
const (
	suffix       = ".upload"         // begins the suffix of each
	recordSuffix = suffix + ".json"  // the record
	dataSuffix   = suffix + ".data"  // the data so far
	qcow2Suffix  = suffix + ".qcow2" // a complete image
)

const recordVersion = 1

// record is what an upload stores for the next request, and for the next process. Everything in it
// is on storage.
type record struct {
	Version   int       `json:"version"`
	ID        string    `json:"id"`
	Resumable bool      `json:"resumable"`
	Made      bool      `json:"made"`             // the upload has made the volume
	Coding    string    `json:"coding,omitempty"` // the packing, if the client gives one
	Packed    bool      `json:"packed"`           // only the process that began it can resume it
	Placed    bool      `json:"placed"`           // all data has come, and becomes the disk
	Touched   time.Time `json:"touched"`          // when data last came
	// Length of all the data, bytes; -1 while it is unknown
	Length int64        `json:"length"`
	Offset int64        `json:"offset"`         // how much of it has come
	Format image.Format `json:"format"`         // "" while there is too little data to tell
	Head   []byte       `json:"head,omitempty"` // what has come while Format is ""
	// Sums are the states of the unfinished digests. Want are the digests that the client has
	// announced.
	Sums map[string][]byte `json:"sums,omitempty"`
	Want digests           `json:"want,omitempty"`
}

// maxAge is how long an interrupted upload can be resumed.
const maxAge = 24 * time.Hour

// loadRecord reads the record of an upload to a disk. It returns fs.ErrNotExist if there is none.
func loadRecord(disk string) (record, error) {
	var r record
	err := durable.LoadRecord(disk+recordSuffix, &r, recordVersion)
	if err == nil {
		err = r.check()
	}
	if err != nil {
		return record{}, err
	}
	if _, err := os.Lstat(disk + dataSuffix); err == nil {
		r.Placed = false // a kill came first: the file with the disk's name is not this upload's
	}
	return r, nil
}

// check refuses a record that contradicts itself.
func (r *record) check() error {
	undecided := r.Format == ""
	if r.ID == "" || r.Offset < 0 || r.Length < -1 ||
		r.Length >= 0 && r.Offset > r.Length || undecided && int64(len(r.Head)) != r.Offset ||
		!undecided && r.Format != image.FormatRaw && r.Format != image.FormatQcow2 &&
			!image.IsForeign(r.Format) {
		return errors.New("contradicts itself")
	}
	return nil
}

// old reports whether the upload was not continued for too long.
func (r *record) old() bool { return time.Since(r.Touched) >= maxAge }

// goesOn reports whether another process can resume the upload.
func (r *record) goesOn() bool {
	return r.Resumable && !r.Packed && !r.old()
}

// save replaces the record in one step. When it returns, the record is on storage.
func (r *record) save(disk string) error {
	text, err := durable.EncodeRecord(r)
	if err != nil {
		return err
	}
	// Without a spare: the files of an upload are removed when it is complete.
	err = durable.Replace(nil, disk+recordSuffix, text, "", (*os.File).Sync)
	if err != nil {
		return fmt.Errorf("the state of the upload: %w", err)
	}
	return nil
}

// clearFiles removes the files that an upload has left. It removes a disk only with placed: then
// the record says that the upload made the disk. It removes the record last, so that the next start
// clears again if this is interrupted.
func clearFiles(v Volume, placed bool) error {
	disk := v.Disk()
	err := removeFiles(v, func(file string) bool {
		return (placed || strings.HasPrefix(file, disk+suffix)) && file != disk+recordSuffix
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return osfile.Remove(disk + recordSuffix)
}

// removeFiles removes a volume's files for which which returns true.
func removeFiles(v Volume, which func(file string) bool) error {
	files, err := v.Files()
	for _, file := range files {
		if which(file) {
			err = errors.Join(err, osfile.RemoveAll(file))
		}
	}
	return err
}

// takeBack makes a placed file the data of its upload again. It first removes what the volume has
// begun to make of that file: a later attempt would take that for a disk without its file, or for
// its own.
func takeBack(v Volume) error {
	disk := v.Disk()
	placed := disk + qcow2Suffix
	if _, err := os.Lstat(placed); errors.Is(err, fs.ErrNotExist) {
		placed = disk
	}
	err := removeFiles(v, func(file string) bool {
		return file != placed && !strings.HasPrefix(file, disk+suffix)
	})
	if err == nil {
		err = osfile.Rename(placed, disk+dataSuffix, 0)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
