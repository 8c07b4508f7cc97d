package registry

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBootOrder: an order that is written can be read, and a block that is named twice counts once.
func TestBootOrder(t *testing.T) {
	d := BootDisk{Name: "a b.qcow2", Size: 10 << 20}
	for _, block := range []int64{0, 7, 8, 9, 3} {
		d.Add(block)
	}
	order := &BootOrder{Disks: []BootDisk{d, {Name: "b", Size: 1}}}
	var b bytes.Buffer
	_, err := order.WriteTo(&b)
	require.NoError(t, err)
	require.Equal(t, bootHead+"\ndisk 10485760 \"a b.qcow2\"\n0\n7+2\n3\ndisk 1 \"b\"\n",
		b.String())
	again, err := ReadBootOrder(&b)
	require.NoError(t, err)
	require.Equal(t, order, again)

	again, err = ReadBootOrder(strings.NewReader(bootHead + "\ndisk 1000000 \"a\"\n4+1\n5+1\n4\n"))
	require.NoError(t, err)
	require.Equal(t, []BootRun{{4, 3}}, again.Disks[0].Blocks)
}

// TestBootOrderRefuses: an order that makes no sense is refused, and the error names the line.
func TestBootOrderRefuses(t *testing.T) {
	disk := bootHead + "\ndisk 1000000 \"a\"\n"
	for text, want := range map[string]string{
		"":                               "not a boot order",
		"kubevirt-disk boot order 2\n":   "not a boot order",
		bootHead + "\n7\n":               "line 2: blocks come before",
		bootHead + "\ndisk 0 \"a\"\n":    "not the size",
		bootHead + "\ndisk 9 a\n":        "not a quoted name",
		disk + "-1\n":                    "line 3: \"-1\" is neither a block",
		disk + "1+-1\n":                  "neither a block",
		disk + "1+x\n":                   "neither a block",
		disk + "16\n":                    "does not lie in a disk of 16 blocks",
		disk + "15+1\n":                  "does not lie in",
		disk + "9223372036854775807+1\n": "does not lie in",
		bootHead + "\ndisk 9223372036854775807 \"a\"\n0+40000\n": "more than 32768 blocks",
		bootHead + "\ndisk 9223372036854775807 \"a\"\n0+32767\n40000\n": "line 4: there are more " +
			"than 32768 blocks",
		bootHead + "\n" + strings.Repeat("disk 1 \"a\"\n", 1025): "more than 1024 disks",
		bootHead + "\n" + strings.Repeat("x", 70000):             "too long",
		disk + strings.Repeat("1\n", 9<<20):                      "more than 16777216 bytes",
	} {
		_, err := ReadBootOrder(strings.NewReader(text))
		require.ErrorContains(t, err, want, "%.60q", text)
	}
}

// FuzzBootOrder reads anything as a boot order. What is accepted is bounded, lies in its disks, and
// is the same after it is written and read again.
func FuzzBootOrder(f *testing.F) {
	f.Add([]byte(bootHead + "\ndisk 1000000 \"a\"\n4+1\n5+1\n4\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		order, err := ReadBootOrder(bytes.NewReader(content))
		if err != nil {
			return
		}
		for _, d := range order.Disks {
			n := int64(0)
			for _, r := range d.Blocks {
				n += r.Count
				if r.First < 0 || r.Count < 1 || (r.First+r.Count-1)*BootBlock >= d.Size {
					t.Fatal(d)
				}
			}
			if n > MaxBootBlocks {
				t.Fatal(n)
			}
		}
		var b bytes.Buffer
		if _, err := order.WriteTo(&b); err != nil {
			t.Fatal(err)
		}
		again, err := ReadBootOrder(&b)
		if err != nil || fmt.Sprint(again) != fmt.Sprint(order) {
			t.Fatal(err, again, order)
		}
	})
}
