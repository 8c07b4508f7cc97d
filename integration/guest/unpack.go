package guest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
)

// The fields of a bzImage that lead to the packed kernel: The Linux/x86 Boot Protocol.
const (
	setupSectorsAt  = 0x1f1 // of 512 bytes, without the first one
	payloadOffsetAt = 0x248 // from the end of these sectors
	payloadLengthAt = 0x24c
	headerEnd       = 0x250
)

// unpackKernel writes a kernel of Debian as a file that QEMU starts with -kernel, and that does not
// unpack itself: this takes an emulated machine half of its time to boot. Neither firmware nor a
// boot loader starts such a file. A kernel that is not packed with xz is copied. It needs xz.
func unpackKernel(packed, to string) error {
	image, err := os.ReadFile(packed)
	if err != nil {
		return err
	}
	if payload := payload(image); bytes.HasPrefix(payload, []byte("\xfd7zXZ\x00")) {
		// The kernel's size follows what is packed.
		cmd := exec.Command("xz", "--decompress", "--stdout", "--single-stream")
		cmd.Stdin = bytes.NewReader(payload)
		if image, err = cmd.Output(); err != nil {
			return fmt.Errorf("unpack %s with xz: %w", packed, err)
		}
	}
	err = os.WriteFile(to+".new", image, 0o644)
	if err != nil {
		return err
	}
	return os.Rename(to+".new", to)
}

// payload is the packed kernel in a bzImage, or nil.
func payload(image []byte) []byte {
	if len(image) < headerEnd {
		return nil
	}
	start := (int(image[setupSectorsAt]) + 1) * sectorSize
	start += int(binary.LittleEndian.Uint32(image[payloadOffsetAt:]))
	length := int(binary.LittleEndian.Uint32(image[payloadLengthAt:]))
	if start > len(image) || length > len(image)-start {
		return nil
	}
	return image[start : start+length]
}
