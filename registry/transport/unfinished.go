package transport

import (
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/flock"
)

// unfinished notes in a file where an upload goes on. The file outlives the process. It is locked
// while the blob is sent, so two pushes never send to the same upload. Anybody who knows the
// address may be able to send to it, so the file is private, and no message contains the address.
//
// If a note cannot be written, the push goes on, so no method returns an error. A nil *unfinished
// notes nothing.
type unfinished struct {
	file *os.File
}

const (
	// maxLocation limits how much of such a file is read. Bytes.
	maxLocation = 64 << 10
	// uploadAge is the age at which an upload is forgotten. Registries remove theirs sooner.
	uploadAge = 30 * 24 * time.Hour
	// uploadSuffix ends the names of such files.
	uploadSuffix = ".upload"
)

// rememberUpload opens the file of an upload of a blob to a repository. nil: the directory is "",
// it cannot be written, or another process sends the same blob.
func rememberUpload(dir, repository, digest string) *unfinished {
	if dir == "" || os.MkdirAll(dir, 0o700) != nil {
		return nil
	}
	forgetOld(dir, time.Now().Add(-uploadAge))
	name := sha256.Sum256([]byte(repository + "@" + digest))
	file, err := os.OpenFile(filepath.Join(dir, hex.EncodeToString(name[:])+uploadSuffix),
		os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil
	}
	if flock.Lock(file, unix.LOCK_EX|unix.LOCK_NB) != nil {
		_ = file.Close()
		return nil
	}
	return &unfinished{file}
}

// forgetOld removes notes that were not used for long.
func forgetOld(dir string, before time.Time) {
	all, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range all {
		info, err := e.Info()
		if err == nil && strings.HasSuffix(e.Name(), uploadSuffix) &&
			info.ModTime().Before(before) {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}

// location is where the upload goes on; nil: it has not begun.
func (u *unfinished) location() *url.URL {
	if u == nil {
		return nil
	}
	text := make([]byte, maxLocation)
	n, _ := u.file.ReadAt(text, 0)
	line, _, complete := strings.Cut(string(text[:n]), "\n")
	at, err := url.Parse(line)
	if err != nil || !complete || !at.IsAbs() {
		return nil
	}
	return at
}

// remember notes where the upload goes on.
func (u *unfinished) remember(at *url.URL) {
	if u == nil {
		return
	}
	text := at.String() + "\n"
	if _, err := u.file.WriteAt([]byte(text), 0); err == nil {
		_ = u.file.Truncate(int64(len(text))) // text behind the line is never read
	}
}

// forget notes that no upload can go on.
func (u *unfinished) forget() {
	if u != nil {
		_ = u.file.Truncate(0)
	}
}

// close removes the file if no upload can go on.
func (u *unfinished) close() {
	if u == nil {
		return
	}
	if info, err := u.file.Stat(); err == nil && info.Size() == 0 {
		_ = os.Remove(u.file.Name()) // a process that has opened it meanwhile only begins again
	}
	_ = u.file.Close()
}
