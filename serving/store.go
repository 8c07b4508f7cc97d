package serving

import "fmt"

// Store keeps what a disk in use must remember after a kill of the daemon and, if the disk survives
// that, after a loss of power. It belongs to the content of the disk: when the content is replaced,
// the store must be empty. A name is a few lower case letters and hyphens. Any number of goroutines
// may call the methods.
type Store interface {
	// Load returns the last saved data of the name, or nil if there is none. It returns an error if
	// the data was damaged since.
	Load(name string) ([]byte, error)
	// Save replaces the data under the name, completely or not at all. When it returns nil, the
	// data is as durable as the disk's content after a Flush. Empty data deletes the name. Save
	// does not keep data.
	Save(name string, data []byte) error
	// Where tells a person where the data is, to look at it or to remove it.
	Where(name string) string
}

// ReplaceStored replaces the data before by next in the store. The disk goes on with before until
// that has succeeded. A failed Save may still have stored next, which the next start must not use.
// So ReplaceStored then saves before again. If that fails, too, unsure is true: the store may have
// either. A nil store keeps nothing.
func ReplaceStored(store Store, name string, next, before []byte) (unsure bool, err error) {
	if store == nil {
		return false, nil
	}
	if err = store.Save(name, next); err == nil || store.Save(name, before) == nil {
		return false, err
	}
	return true, fmt.Errorf("%w; ask again before the daemon is restarted, which would go by one "+
		"or the other", err)
}

// storedHandover is the name of the record with a handoverState.
const storedHandover = "handover"
