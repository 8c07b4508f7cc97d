package guest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// The layout of a disk of BootDisk, in sectors: GRUB's first sector with the partition table, the
// rest of GRUB, and from partitionAt a file system with the kernel and the initramfs.
const (
	sectorSize  = 512
	partitionAt = 2048
	// tableAt is where the partition table lies in the first sector, bytes.
	tableAt = 446
)

// grubConfig tells GRUB what to do, without a menu.
const grubConfig = `set root=(hd0,msdos1)
linux /vmlinuz ` + kernelArgs + `
initrd /initrd
boot
`

// BootDisk writes a raw disk of this size, from which a PC boots a guest of Start by itself. Name
// it in MachineOptions.Args, with FromDisk. The error is a *FetchError if a package cannot be
// fetched. BootDisk needs mke2fs.
func BootDisk(path string, size int64, opt Options) error {
	work, err := os.MkdirTemp(filepath.Dir(path), ".boot-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	tree := filepath.Join(work, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		return err
	}
	if _, _, err := buildWith(tree, withShell(opt), copyFile); err != nil {
		return err
	}
	first, rest, err := grub(work, opt.CacheDir)
	if err != nil {
		return fmt.Errorf("guest: %w", err)
	}
	if len(rest) > (partitionAt-1)*sectorSize {
		return fmt.Errorf("guest: GRUB has %d bytes, which do not fit before the partition",
			len(rest))
	}
	sectors := size/sectorSize - partitionAt
	copy(first[tableAt:], partitionTable(uint32(sectors)))
	disk, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = disk.Write(append(first, rest...))
	err = errors.Join(err, disk.Truncate(size), disk.Close())
	if err != nil {
		return err
	}
	out, err := exec.Command("mke2fs", "-q", "-F", "-t", "ext2", "-d", tree, "-E",
		fmt.Sprintf("offset=%d", partitionAt*sectorSize), path,
		fmt.Sprintf("%dk", sectors*sectorSize/1024)).CombinedOutput()
	if err != nil {
		return fmt.Errorf("guest: make a file system: %w: %s", err, out)
	}
	return nil
}

// partitionTable has one active partition. The cylinder addresses are not used.
func partitionTable(sectors uint32) []byte {
	const active, linux = 0x80, 0x83
	p := make([]byte, 4*16+2)
	p[0], p[4] = active, linux
	binary.LittleEndian.PutUint32(p[8:], partitionAt)
	binary.LittleEndian.PutUint32(p[12:], sectors)
	p[64], p[65] = 0x55, 0xaa
	return p
}

// grub makes the first sector of the disk, and the sectors after it.
func grub(work, cacheDir string) (first, rest []byte, err error) {
	cache, err := openCache(cacheDir, nil)
	if err != nil {
		return nil, nil, err
	}
	defer cache.close()
	trees, err := cache.unpack([]string{"grub-common", "grub-pc-bin"})
	if err != nil {
		return nil, nil, err
	}
	var libraries []string
	for _, t := range trees[:len(trees)-2] {
		if !strings.HasSuffix(filepath.Dir(t), "/libc6") { // the program runs with this machine's
			libraries = append(libraries, filepath.Join(t, "lib", "x86_64-linux-gnu"),
				filepath.Join(t, "usr", "lib", "x86_64-linux-gnu"))
		}
	}
	program, parts := trees[len(trees)-2], trees[len(trees)-1]
	modules := filepath.Join(parts, "usr", "lib", "grub", "i386-pc")
	config, image := filepath.Join(work, "grub.cfg"), filepath.Join(work, "core.img")
	if err := os.WriteFile(config, []byte(grubConfig), 0o644); err != nil {
		return nil, nil, err
	}
	cmd := exec.Command(filepath.Join(program, "usr", "bin", "grub-mkimage"), "-O", "i386-pc",
		"-d", modules, "-p", "/", "-c", config, "-o", image,
		"biosdisk", "part_msdos", "ext2", "linux", "boot")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+strings.Join(libraries, ":"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, nil, fmt.Errorf("grub-mkimage: %w: %s", err, out)
	}
	if first, err = os.ReadFile(filepath.Join(modules, "boot.img")); err != nil {
		return nil, nil, err
	}
	if len(first) != sectorSize {
		return nil, nil, fmt.Errorf("GRUB's boot.img has %d bytes, and should have %d", len(first),
			sectorSize)
	}
	rest, err = os.ReadFile(image)
	return first, rest, err
}
