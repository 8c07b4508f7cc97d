// Package libnbd stands for the Go binding of libnbd, which is on no module proxy. KubeVirt's
// launcher uses it for backups of a disk, and needs it to be compiled. Every call is an error.
package libnbd

import "errors"

var errAbsent = errors.New("libnbd is not here: this launcher was built for tests without it")

// Names of metadata contexts, and flags of extents, as in the NBD protocol.
const (
	CONTEXT_BASE_ALLOCATION   = "base:allocation"
	CONTEXT_QEMU_DIRTY_BITMAP = "qemu:dirty-bitmap:"

	STATE_HOLE  uint32 = 1
	STATE_ZERO  uint32 = 2
	STATE_DIRTY uint32 = 1
)

type LibnbdExtent struct{ Length, Flags uint64 }

type (
	ExtentCallback       func(context string, offset uint64, e []LibnbdExtent, err *int) int
	BlockStatus64OptArgs struct{}
	PreadOptArgs         struct{}
	Libnbd               struct{}
)

func Create() (*Libnbd, error)                            { return nil, errAbsent }
func (*Libnbd) AddMetaContext(string) error               { return errAbsent }
func (*Libnbd) CanMetaContext(string) (bool, error)       { return false, errAbsent }
func (*Libnbd) GetSize() (uint64, error)                  { return 0, errAbsent }
func (*Libnbd) SetExportName(string) error                { return errAbsent }
func (*Libnbd) ConnectUnix(string) error                  { return errAbsent }
func (*Libnbd) Pread([]byte, uint64, *PreadOptArgs) error { return errAbsent }
func (*Libnbd) Close() *error                             { return nil }
func (*Libnbd) BlockStatus64(uint64, uint64, ExtentCallback, *BlockStatus64OptArgs) error {
	return errAbsent
}
