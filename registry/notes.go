package registry

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// notes has the digest of each chunk that was read from a layer before the layer's digest could be
// checked. The digest is on storage before the chunk is used. When a chunk is fetched again, it
// must be the same, also after a restart. So the content that is verified at the end is the served
// content.
//
// The file is notesMagic, the state at notesState, and a SHA-256 for each chunk from notesSums on.
// Zeros mean that the chunk was not read yet.
type notes struct {
	file  *os.File
	state atomic.Int32   // a noteState
	looks [64]sync.Mutex // by the chunk's number modulo 64; held until the note is written
}

type noteState int32

const (
	noteOpen     noteState = iota // the digest of the layer is not checked yet
	noteVerified                  // the layer's digest is right, and so is every note
	noteWrong                     // the layer's digest is wrong
)

const (
	notesMagic = "KVDNOTE\x01"
	notesState = 8
	notesSums  = 4096
)

// changedError says that the content of a chunk differs from the first time that it was read.
type changedError struct{ chunk int64 }

func (e *changedError) Error() string {
	return fmt.Sprintf("chunk %d has other content than when it was first read", e.chunk)
}

// openNotes opens the notes of a layer in a directory, and makes them if they are missing.
func openNotes(dir *os.Root, name string) (*notes, error) {
	// With O_DSYNC a note is on storage when it is written. The disk that is made from the chunk
	// may survive a crash of the machine, so the note must, too.
	f, err := dir.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_DSYNC, 0o600)
	if err != nil {
		return nil, err
	}
	n := &notes{file: f}
	head := make([]byte, notesState+1)
	switch _, err = f.ReadAt(head, 0); {
	case err == nil && string(head[:notesState]) == notesMagic && head[notesState] <= 2:
		n.state.Store(int32(head[notesState]))
	case errors.Is(err, io.EOF):
		copy(head, notesMagic)
		clear(head[notesState:])
		_, err = f.WriteAt(head, 0)
	case err == nil:
		err = errors.New("is not a list of notes")
	}
	if err != nil {
		return nil, errors.Join(&fs.PathError{Op: "open", Path: f.Name(), Err: err}, f.Close())
	}
	return n, nil
}

// check notes a chunk that is read for the first time, and later compares it with its note.
func (n *notes) check(chunk int64, p []byte) error {
	sum := sha256.Sum256(p)
	at := notesSums + chunk*sha256.Size
	look := &n.looks[chunk%int64(len(n.looks))]
	look.Lock()
	defer look.Unlock()
	var noted [sha256.Size]byte
	if _, err := n.file.ReadAt(noted[:], at); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	switch noted {
	case sum:
		return nil
	case [sha256.Size]byte{}:
		if n.now() != noteOpen {
			return &changedError{chunk} // every chunk has a note
		}
		_, err := n.file.WriteAt(sum[:], at)
		return err
	}
	return &changedError{chunk}
}

func (n *notes) now() noteState { return noteState(n.state.Load()) }

func (n *notes) set(state noteState) error {
	n.state.Store(int32(state))
	_, err := n.file.WriteAt([]byte{byte(state)}, notesState)
	return err
}

func (n *notes) close() error { return n.file.Close() }
