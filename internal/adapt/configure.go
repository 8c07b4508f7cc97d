package adapt

import (
	"bytes"
	"errors"
	"fmt"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/disk/image"
)

// configBlock is how much of the configuration is written at once, in bytes.
const configBlock = 4096

// Config reads the part of an image with the configuration of the machine.
func Config(img *image.Image) ([]byte, error) {
	config := make([]byte, adapter.MaxConfig)
	if _, err := img.ReadAt(config, adapter.ConfigOffset); err != nil {
		return nil, fmt.Errorf("the configuration of %q: %w", img.Name(), err)
	}
	return config, nil
}

// Configure gives a disk of an earlier start the configuration that the image has now. A disk may
// have its own copy of the one before. The guest never writes there. Only blocks that differ are
// written, so a disk that has the configuration already is not changed.
func Configure(d disk.Disk, config []byte) error {
	before := make([]byte, len(config))
	if _, err := d.ReadAt(before, adapter.ConfigOffset); err != nil {
		return fmt.Errorf("read its configuration: %w", err)
	}
	changed := false
	for at := 0; at < len(config); at += configBlock {
		block := config[at:min(at+configBlock, len(config))]
		if bytes.Equal(block, before[at:at+len(block)]) {
			continue
		}
		changed = true
		_, err := d.WriteAt(block, adapter.ConfigOffset+int64(at))
		if errors.Is(err, disk.ErrReadOnly) {
			return errors.New("it has its own copy of another configuration, and is read-only: " +
				"serve it once without read-only, or with the options that it had before")
		}
		if err != nil {
			return fmt.Errorf("write its configuration: %w", err)
		}
	}
	if !changed {
		return nil
	}
	return d.Flush()
}
