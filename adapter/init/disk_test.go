package guestinit

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"kubevirt.io/disk/internal/testtool"
)

func TestListDisks(t *testing.T) {
	sys := t.TempDir()
	for name, text := range map[string]string{
		"vda/serial": "container\n", "sda/device/vpd_pg80": "\x00\x80\x00\x06  1234",
		"nvme0n1/device/serial": "n1  \n", "vdb/size": "1", "loop0/size": "1", "sr0/size": "1",
	} {
		file := filepath.Join(sys, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	}
	require.Equal(t, []blockDevice{{"nvme0n1", "n1"}, {"sda", "1234"}, {"vda", "container"},
		{"vdb", ""}}, listDisks(sys))
	require.Empty(t, listDisks(filepath.Join(sys, "none")))
}

func TestChooseDisk(t *testing.T) {
	list := []blockDevice{{"sda", "12345678901234567890"}, {"vda", "12345678901234567890"}}
	name := testtool.Must(chooseDisk(list, "123456789012345678901234"))(t)
	require.Equal(t, "vda", name, "virtio cuts serial numbers")
	name = testtool.Must(chooseDisk(list, "other"))(t)
	require.Empty(t, name)
	_, err := chooseDisk(list, "")
	require.ErrorContains(t, err, "several disks, sda (serial number")
	name = testtool.Must(chooseDisk(list[:1], ""))(t)
	require.Equal(t, "sda", name)
}

func TestParseSuperblock(t *testing.T) {
	b := make([]byte, superSize)
	binary.LittleEndian.PutUint16(b[0x38:], superMagic)
	binary.LittleEndian.PutUint32(b[0x18:], 2)
	binary.LittleEndian.PutUint32(b[4:], 7)
	binary.LittleEndian.PutUint32(b[0x150:], 1)
	s := testtool.Must(parseSuperblock(b))(t)
	require.Equal(t, superblock{blocks: 7, blockSize: 4096}, s)
	binary.LittleEndian.PutUint32(b[0x60:], feature64)
	s = testtool.Must(parseSuperblock(b))(t)
	require.EqualValues(t, 1<<32+7, s.blocks)
	binary.LittleEndian.PutUint32(b[0x18:], 40)
	require.ErrorContains(t, testtool.Err(parseSuperblock(b)), "2^40 KiB")
	_, err := parseSuperblock(make([]byte, superSize))
	require.ErrorContains(t, err, "no ext4 file system")
}

// TestModules: one that cannot be loaded does not keep the others from it.
func TestModules(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "order"), []byte("base\nnet\n"), 0o644))
	var files []string
	err := loadModules(dir, func(file string) error {
		files = append(files, file)
		return unix.ENOENT
	})
	require.ErrorContains(t, err, "kernel module base: no such file")
	require.Equal(t, []string{filepath.Join(dir, "base.ko"), filepath.Join(dir, "net.ko")}, files)
}
