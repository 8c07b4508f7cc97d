package registry

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

// unfinished is where an upload goes on, in a file that outlives the process. It is locked while
// the blob is sent: two pushes at once never send to the same upload. Whoever knows the address may
// be able to send to it: nobody else reads the file, and no message has it.
//
// That something cannot be remembered is no reason to end a push, so no method returns an error. A
// nil *unfinished remembers nothing.
type unfinished struct {
	file *os.File
}

const (
	// maxLocation bounds what is read of such a file. Bytes.
	maxLocation = 64 << 10
	// uploadAge is when an upload is forgotten. Registries remove theirs sooner.
	uploadAge = 30 * 24 * time.Hour
	// uploadSuffix ends the names of such files.
	uploadSuffix = ".upload"
)

// rememberUpload opens the file of an upload of a blob to a repository. nil: the directory is "",
// nothing can be written there, or another process sends the same blob.
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

// forgetOld removes what nobody has gone on with.
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
		_ = u.file.Truncate(int64(len(text))) // what is behind the line is not read
	}
}

// forget notes that there is no upload to go on with.
func (u *unfinished) forget() {
	if u != nil {
		_ = u.file.Truncate(0)
	}
}

// close removes the file if there is nothing to go on with.
func (u *unfinished) close() {
	if u == nil {
		return
	}
	if info, err := u.file.Stat(); err == nil && info.Size() == 0 {
		_ = os.Remove(u.file.Name()) // who has opened it meanwhile only begins anew
	}
	_ = u.file.Close()
}
