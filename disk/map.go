package disk

const (
	// MaxMapCells is the most cells that a Map has.
	MaxMapCells = 4 << 10
	// minMapCell is the smallest part of a disk that a cell stands for, in bytes.
	minMapCell = 4 << 10
)

// Mapper is a disk that can tell people roughly where its content is.
type Mapper interface {
	// Map sums up the disk. The first call may wait for storage. No call takes a lock that a
	// guest's command waits for. The guest's work is remembered by cells only, so the amounts are
	// rough. Same concurrency as ReadAt.
	Map() *Map
}

// Map is a rough picture of a disk, in parts of the same length.
type Map struct {
	Size      int64 // bytes
	CellBytes int64 // length of each part; the last one may be shorter; a power of two
	Cells     []Cell
}

// Cell sums up one part of a disk. The amounts are bytes, and add up to the length of the part.
type Cell struct {
	Image   int64 // content that only the image has
	Copied  int64 // content in the disk's own file: of the image, or of an earlier start
	Written int64 // written by the guest since the disk was opened
	Hole    int64 // takes no space, and reads as zeros
	// Read says that the guest has read here since the last call of Map. It is false if that call
	// was more than a few seconds ago.
	Read bool
}

// MapCellBytes returns how many bytes each cell of a disk's Map covers.
func MapCellBytes(size int64) int64 {
	cell := int64(minMapCell)
	for cell*MaxMapCells < size {
		cell <<= 1
	}
	return cell
}

// NewMap makes an empty Map of a disk of size bytes.
func NewMap(size int64) *Map {
	cell := MapCellBytes(size)
	return &Map{Size: size, CellBytes: cell, Cells: make([]Cell, (size+cell-1)/cell)}
}

// Fold returns the same picture with at most that many cells, but at least one.
func (m *Map) Fold(cells int) *Map {
	f, by := &Map{Size: m.Size, CellBytes: m.CellBytes}, 1
	for (len(m.Cells)+by-1)/by > max(cells, 1) {
		f.CellBytes, by = f.CellBytes<<1, by<<1
	}
	for i := 0; i < len(m.Cells); i += by {
		part := Map{Cells: m.Cells[i:min(i+by, len(m.Cells))]}
		f.Cells = append(f.Cells, part.Total())
	}
	return f
}

// Range returns the part of the disk that a cell stands for. Bytes.
func (m *Map) Range(cell int) (off, length int64) {
	off = int64(cell) * m.CellBytes
	return off, min(m.CellBytes, m.Size-off)
}

// Total adds up all cells.
func (m *Map) Total() (sum Cell) {
	for _, c := range m.Cells {
		sum.Image += c.Image
		sum.Copied += c.Copied
		sum.Written += c.Written
		sum.Hole += c.Hole
		sum.Read = sum.Read || c.Read
	}
	return sum
}
