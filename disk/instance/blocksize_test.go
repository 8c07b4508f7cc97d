package instance

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/internal/testtool"
)

// TestMadeForOtherBlocks: what is on a disk says for which logical blocks it was made.
func TestMadeForOtherBlocks(t *testing.T) {
	with := func(parts map[int]string) []byte {
		head := make([]byte, 2*disk.LongBlock)
		for off, text := range parts {
			copy(head[off:], text)
		}
		return head
	}
	const boot, table = "\x55\xaa", "EFI PART"
	for name, c := range map[string]struct {
		head        []byte
		short, long bool // fits blocks of that length
	}{
		"zeros":                {with(nil), true, true},
		"short":                {make([]byte, 512), true, true},
		"GPT for short blocks": {with(map[int]string{510: boot, 512: table}), true, false},
		"GPT for long blocks": {with(map[int]string{510: boot, disk.LongBlock: table}), false,
			true},
		"GPT for both": {with(map[int]string{510: boot, 512: table, disk.LongBlock: table}), true,
			true},
		"MBR, or a FAT":          {with(map[int]string{510: boot}), true, false},
		"XFS for short blocks":   {with(map[int]string{0: "XFSB", 102: "\x02\x00"}), true, false},
		"XFS for long blocks":    {with(map[int]string{0: "XFSB", 102: "\x10\x00"}), true, true},
		"something, as ext4 has": {with(map[int]string{1080: "\x53\xef"}), true, true},
	} {
		require.Equal(t, c.short, madeFor(c.head, disk.SectorSize) == "", name)
		require.Equal(t, c.long, madeFor(c.head, disk.LongBlock) == "", name)
	}
}

// TestBlockSizeIsKept: a disk keeps its logical blocks whatever is said later, and content that was
// made for others is refused.
func TestBlockSizeIsKept(t *testing.T) {
	for name, mode := range map[string]CopyMode{"clone": CopyClone, "copy-on-write": CopyOnWrite,
		"none": CopyNone} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "a.raw")
			require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{7}, 4*disk.LongBlock), 0o600))
			persistent := ""
			if mode != CopyNone {
				persistent = filepath.Join(dir, "volume")
			}
			open := func(blockSize int, size int64) (*Instance, error) {
				return Open(t.Context(), openGood(t, path), Options{Mode: mode, Size: size,
					WorkDir: filepath.Join(dir, "work"), PersistentDir: persistent,
					BlockSize: blockSize})
			}
			_, err := open(1024, 0)
			require.ErrorContains(t, err, "a logical block has 512 or 4096 bytes, not 1024")
			if mode != CopyNone {
				_, err = open(disk.LongBlock, 5*disk.LongBlock+512)
				require.ErrorContains(t, err, "no multiple of that")
			}
			for _, said := range []int{disk.LongBlock, 0, disk.LongBlock} {
				inst := testtool.Must(open(said, 0))(t)
				require.Equal(t, disk.LongBlock, inst.BlockSize)
				if mode != CopyNone {
					require.ErrorContains(t, inst.Grow(inst.Size()+512), "a multiple of 4096 bytes")
				}
				require.NoError(t, inst.Close())
			}
			if mode != CopyNone { // a size that does not fit changes nothing
				_, err = open(0, 8*disk.LongBlock+512)
				require.ErrorContains(t, err, "is not a multiple of 4096 bytes")
			}
			inst, err := open(disk.SectorSize, 0)
			if mode == CopyNone { // it is the file's, and nothing of ours is lost
				require.NoError(t, err)
				require.Equal(t, disk.SectorSize, inst.BlockSize)
				require.NoError(t, inst.Close())
				return
			}
			require.ErrorContains(t, err, "set the block size to 4096 again")
			inst = testtool.Must(open(0, 0))(t)
			require.Equal(t, disk.LongBlock, inst.BlockSize)
			require.NoError(t, inst.Close())
		})
	}
	dir := t.TempDir()
	content := make([]byte, 4*disk.LongBlock)
	copy(content[512:], "EFI PART")
	path := filepath.Join(dir, "a.raw")
	require.NoError(t, os.WriteFile(path, content, 0o600))
	for _, mode := range []CopyMode{CopyClone, CopyNone} {
		var wrong *BlockSizeError
		_, err := Open(t.Context(), openGood(t, path), Options{Mode: mode,
			WorkDir: filepath.Join(dir, "work"), BlockSize: disk.LongBlock})
		require.ErrorAs(t, err, &wrong)
		require.ErrorContains(t, err, `"a.raw" cannot have logical blocks of 4096 bytes: its `+
			"partition table is for blocks of 512 bytes; leave the block size out")
	}
	// The same for a file that comes with a volume.
	volume := filepath.Join(dir, "volume")
	require.NoError(t, os.Mkdir(volume, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(volume, PersistentName), content, 0o600))
	_, err := Open(t.Context(), nil, Options{PersistentDir: volume, BlockSize: disk.LongBlock})
	require.ErrorAs(t, err, new(*BlockSizeError))
	inst := testtool.Must(Open(t.Context(), nil, Options{PersistentDir: volume}))(t)
	require.Equal(t, disk.SectorSize, inst.BlockSize)
	require.NoError(t, inst.Close())
}

// TestBlockSizeUnasked: content that was made for long blocks is not served with short ones because
// nobody has said anything. A disk that is known keeps its blocks, whatever the guest has written.
func TestBlockSizeUnasked(t *testing.T) {
	long := make([]byte, 4*disk.LongBlock)
	copy(long[disk.LongBlock:], "EFI PART")
	for _, mode := range []CopyMode{CopyClone, CopyOnWrite, CopyNone} {
		t.Run(string(mode), func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "a.raw")
			require.NoError(t, os.WriteFile(path, long, 0o600))
			open := func(opt Options) (*Instance, error) {
				opt.Mode, opt.WorkDir = mode, filepath.Join(dir, "work")
				return Open(t.Context(), openGood(t, path), opt)
			}
			for _, size := range []int{0, disk.SectorSize} {
				_, err := open(Options{BlockSize: size})
				require.ErrorAs(t, err, new(*BlockSizeError))
				require.ErrorContains(t, err, "its partition table is for blocks of 4096 bytes; "+
					"set the block size to 4096")
			}
			inst, err := open(Options{BlockSizeKnown: true})
			require.NoError(t, err, "a guest has written that")
			require.Equal(t, disk.SectorSize, inst.BlockSize)
			require.NoError(t, inst.Close())
			inst = testtool.Must(open(Options{}))(t, "it has had short blocks so far")
			require.NoError(t, inst.Close())
		})
	}
	volume := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(volume, PersistentName), long, 0o600))
	_, err := Open(t.Context(), nil, Options{PersistentDir: volume})
	require.ErrorAs(t, err, new(*BlockSizeError))
	inst, err := Open(t.Context(), nil, Options{PersistentDir: volume, BlockSize: disk.LongBlock})
	require.NoError(t, err)
	require.NoError(t, inst.Close())
}
