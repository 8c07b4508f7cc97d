package adapt

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io"

	"kubevirt.io/disk/internal/osfile"
)

// ErrNoKernel says that a file is not a kernel that a machine can boot.
var ErrNoKernel = errors.New("it is not a Linux kernel for amd64 or arm64")

// kernelHead is how much of a kernel says what it is, in bytes.
const kernelHead = 4 << 10

// KernelArch returns the architecture of a kernel, as Go names it: of an image as Debian has it,
// one that firmware can start, or the uncompressed ELF file.
func KernelArch(path string) (arch string, err error) {
	f, err := osfile.OpenRegular(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	head := make([]byte, kernelHead)
	var in io.Reader = f
	if z, err := gzip.NewReader(f); err == nil { // arm64 has kernels in gzip
		in = z
	} else if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	n, err := io.ReadFull(in, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return "", err
	}
	if arch = kernelArch(head[:n]); arch == "" {
		return "", ErrNoKernel
	}
	return arch, nil
}

// kernelArch reads the magic numbers of the boot protocols (Documentation/arch/x86/boot.rst and
// arch/arm64/booting.rst of Linux), of PE and of ELF.
func kernelArch(head []byte) string {
	at := func(offset int, magic string) bool {
		return len(head) > offset && bytes.HasPrefix(head[offset:], []byte(magic))
	}
	switch {
	case at(0x202, "HdrS"):
		return "amd64"
	case at(0x38, "ARM\x64"):
		return "arm64"
	case at(0, "MZ") && len(head) >= 0x40:
		pe := int(binary.LittleEndian.Uint32(head[0x3c:]))
		switch {
		case pe < 0 || pe > kernelHead:
		case at(pe, "PE\x00\x00\x64\x86"):
			return "amd64"
		case at(pe, "PE\x00\x00\x64\xaa"):
			return "arm64"
		}
	case at(0, elf.ELFMAG+"\x02\x01") && len(head) >= 20:
		switch elf.Machine(binary.LittleEndian.Uint16(head[18:])) {
		case elf.EM_X86_64:
			return "amd64"
		case elf.EM_AARCH64:
			return "arm64"
		}
	}
	return ""
}
