package upload

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/binary"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/disk/image"
	"kubevirt.io/disk/disk/qcow2"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/testtool"
)

func TestPutRaw(t *testing.T) {
	s := newServer(t)
	data := rawDisk(9<<20 + 512)
	requireSays(t, s.put(t, "vm", data), http.StatusCreated, "vm is ready")
	require.True(t, bytes.Equal(data, s.disk(t, "vm")))
	info := testtool.Must(os.Stat(filepath.Join(s.volumes.dir, "vm", diskName)))(t)
	allocated := info.Sys().(*syscall.Stat_t).Blocks * 512
	require.Less(t, allocated, int64(6<<20), "zeros must be holes")
	requireSays(t, s.put(t, "vm", data), http.StatusConflict, "has its data")
	require.True(t, bytes.Equal(data, s.disk(t, "vm")))
}

// TestPutFillsTheVolume: if the disk is smaller than the volume, zeros follow.
func TestPutFillsTheVolume(t *testing.T) {
	s := newServer(t)
	data := rawDisk(2 << 20)
	s.volumes.add(t, "vm", 5<<20)
	requireSays(t, s.put(t, "vm", data), http.StatusCreated)
	require.True(t, bytes.Equal(append(data, make([]byte, 3<<20)...), s.disk(t, "vm")))
}

// packed returns data in each packing.
func packed(t *testing.T, data []byte) map[string][]byte {
	t.Helper()
	return map[string][]byte{"plain": data, "gzip": packtest.Gzip(t, data),
		"zstd": packtest.Zstd(t, data, 8<<20), "xz": packtest.Xz(data),
		"tar": packtest.Tar(t, packtest.File{Name: "disk.img", Data: data})}
}

// makeQcow2 makes an image of a disk.
func makeQcow2(t *testing.T, data []byte) []byte {
	t.Helper()
	dir := t.TempDir()
	raw, out := filepath.Join(dir, "disk.raw"), filepath.Join(dir, "disk.qcow2")
	require.NoError(t, os.WriteFile(raw, data, 0o600))
	img := testtool.Must(image.Open(raw, image.Options{}))(t)
	defer img.Close()
	require.NoError(t, image.ConvertQcow2(context.Background(), img, out, true,
		qcow2.CompressionNone, nil))
	return testtool.Must(os.ReadFile(out))(t)
}

// TestFormats: each format in each packing. TestResume uploads in pieces.
func TestFormats(t *testing.T) {
	raw := rawDisk(5 << 20)
	for format, data := range map[string][]byte{"raw": raw, "qcow2": makeQcow2(t, raw)} {
		for packing, upload := range packed(t, data) {
			t.Run(format+" "+packing, func(t *testing.T) {
				s := newServer(t)
				requireSays(t, s.put(t, "vm", upload), http.StatusCreated)
				require.True(t, bytes.Equal(data, s.disk(t, "vm")))
				require.Equal(t, format == "qcow2", s.volumes.all["vm"].image != "")
			})
		}
	}
}

// TestRefusedContent: data that is not a disk leaves the volume as empty as it was. A volume that
// did not exist before does not exist afterwards.
func TestRefusedContent(t *testing.T) {
	raw := rawDisk(4 << 20)
	image := makeQcow2(t, raw)
	cut := bytes.Clone(image)[:len(image)-70<<10]
	withBacking := bytes.Clone(image)
	copy(withBacking[8:], []byte{0, 0, 0, 0, 0, 0, 1, 0xf8, 0, 0, 0, 4}) // at 504, 4 bytes
	copy(withBacking[504:], "base")
	packs := packed(t, raw)
	tests := map[string]struct {
		data   []byte
		status int
		says   string
	}{
		"nothing":       {nil, 422, "is empty"},
		"a page":        {[]byte("<html><body>404</body></html>"), 422, "HTML"},
		"a text":        {[]byte("no disk at all\n"), 422, "text"},
		"half a sector": {raw[:1000], 422, "multiple of 512"},
		"a VMDK":        {append([]byte("KDMV"), raw...), 422, "VMDK"},
		"a VHD": {append(bytes.Clone(raw),
			append([]byte("conectix"), make([]byte, 504)...)...), 422, "VHD"},
		"a cut image":    {cut, 422, "is not valid"},
		"a backing file": {withBacking, 422, ""},
		"cut gzip":       {packs["gzip"][:len(packs["gzip"])/2], 422, "middle"},
		"cut zstd":       {packs["zstd"][:len(packs["zstd"])/2], 422, "middle"},
		"cut xz":         {packs["xz"][:len(packs["xz"])/2], 422, "xz"},
		"damaged gzip":   {damaged(packs["gzip"]), 422, "cannot be decompressed"},
		"damaged zstd":   {damaged(packs["zstd"]), 422, "cannot be decompressed"},
		"damaged xz":     {damaged(packs["xz"]), 422, "cannot be decompressed"},
		"gzip and more":  {append(bytes.Clone(packs["gzip"]), "more"...), 422, ""},
		"zstd and more":  {append(bytes.Clone(packs["zstd"]), "more"...), 422, ""},
		"xz and more":    {append(bytes.Clone(packs["xz"]), "more"...), 422, ""},
		"gzip thrice": {packtest.Gzip(t, packtest.Gzip(t, packs["gzip"])), 422,
			"more than 2 times"},
		"gzip, zeros and more": {append(append(bytes.Clone(packs["gzip"]), 0, 0), "x"...), 422,
			"zeros"},
		"frames that zstd skips":    {skippable(600), 422, "is empty"},
		"a text of many sectors":    {bytes.Repeat([]byte("no disk\n"), 512<<4), 422, "text"},
		"xz that needs much memory": {packtest.XzNeeding(raw, 25), 422, "memory"},
		// A frame with a window of 3.75 TiB (RFC 8878 3.1.1.1.2).
		"zstd that needs much memory": {append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0, 0xff, 1, 0, 0},
			make([]byte, 8<<10)...), 422, "MiB of memory"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			requireSays(t, s.put(t, "vm", test.data), test.status, test.says)
			s.requireNone(t, "vm")
			s.volumes.add(t, "vm", 64<<20)
			requireSays(t, s.put(t, "vm", test.data), test.status, test.says)
			s.requireEmpty(t, "vm")
			at := s.create(t, "vm", int64(len(test.data)))
			a := s.append(t, at, 0, test.data, true)
			requireSays(t, a, test.status, test.says)
			s.requireEmpty(t, "vm")
			requireSays(t, s.put(t, "vm", raw), http.StatusCreated)
		})
	}
}

// skippable is a frame that zstd skips, with so many bytes.
func skippable(n int) []byte {
	return append(binary.LittleEndian.AppendUint32([]byte("\x5e\x2a\x4d\x18"), uint32(n)),
		make([]byte, n)...)
}

// TestPaddedAndSkipped: what gzip and zstd unpack is unpacked here: files of pzstd, whose frames
// follow others that are skipped, and files of gzip with zeros behind them.
func TestPaddedAndSkipped(t *testing.T) {
	raw := rawDisk(3 << 20)
	half := len(raw) / 2
	one, two := packed(t, raw[:half]), packed(t, raw[half:])
	for name, upload := range map[string][]byte{
		"pzstd": slices.Concat(skippable(4), one["zstd"], skippable(4), two["zstd"]),
		"far":   slices.Concat(skippable(5000), skippable(4), one["zstd"], two["zstd"]),
		"gzip":  slices.Concat(one["gzip"], two["gzip"], make([]byte, 100<<10)),
		"a bit": slices.Concat(one["gzip"], two["gzip"], make([]byte, 1)),
	} {
		s := newServer(t)
		requireSays(t, s.put(t, "vm", upload), http.StatusCreated)
		require.True(t, bytes.Equal(raw, s.disk(t, "vm")), name)
	}
}

// TestContentThatIsNoFile: a request whose content is not the file itself is refused before a
// volume is made.
func TestContentThatIsNoFile(t *testing.T) {
	raw := rawDisk(1 << 20)
	packs := packed(t, raw)
	tests := map[string]struct {
		data        []byte
		field, text string
		status      int
	}{
		"a form":     {raw, "Content-Type", "multipart/form-data; boundary=x", 415},
		"bad form":   {raw, "Content-Type", "Multipart/Form-Data; boundary", 415},
		"ranges":     {raw, "Content-Type", "multipart/byteranges; boundary=x", 415},
		"a message":  {raw, "Content-Type", "message/http", 415},
		"curl":       {raw, "Content-Type", "application/x-www-form-urlencoded", 201},
		"brotli":     {raw, "Content-Encoding", "br", 415},
		"deflate":    {packs["gzip"], "Content-Encoding", "deflate", 415},
		"two":        {packs["gzip"], "Content-Encoding", "gzip, br", 415},
		"gzip":       {packs["gzip"], "Content-Encoding", "gzip", 201},
		"x-gzip":     {packs["gzip"], "Content-Encoding", "X-GZIP, identity", 201},
		"zstd":       {packs["zstd"], "Content-Encoding", "zstd", 201},
		"identity":   {raw, "Content-Encoding", "identity", 201},
		"not gzip":   {raw, "Content-Encoding", "gzip", 422},
		"other than": {packs["zstd"], "Content-Encoding", "gzip", 422},
	}
	for name, test := range tests {
		s := newServer(t)
		a := s.put(t, "vm", test.data, test.field, test.text)
		require.Equal(t, test.status, a.status, "%s: %s", name, a.text)
		if test.status == http.StatusCreated {
			require.True(t, bytes.Equal(raw, s.disk(t, "vm")), name)
			continue
		}
		s.requireNone(t, "vm")
	}
	s := newServer(t)
	at := s.create(t, "vm", -1, "Content-Encoding", "gzip")
	requireSays(t, s.append(t, at, 0, packs["gzip"], true, "Content-Encoding", "gzip"), 415)
	s = s.restart(t)
	requireSays(t, s.append(t, at, 0, raw, true), 422, "Content-Encoding")
}

// damaged flips a bit in the middle.
func damaged(p []byte) []byte {
	p = bytes.Clone(p)
	p[len(p)/2] ^= 0x10
	return p
}

func TestTooLarge(t *testing.T) {
	raw := rawDisk(6 << 20)
	zeros := make([]byte, 80<<20)
	copy(zeros, raw[:4096])
	bomb := packed(t, zeros)
	tests := map[string]struct {
		data []byte
		size int64
	}{
		"raw": {raw, 5 << 20}, "qcow2": {makeQcow2(t, raw), 5 << 20},
		"gzip": {packed(t, raw)["gzip"], 5 << 20}, "a bomb of gzip": {bomb["gzip"], 64 << 20},
		"a bomb of zstd": {bomb["zstd"], 64 << 20},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			s.volumes.add(t, "vm", test.size)
			requireSays(t, s.put(t, "vm", test.data), http.StatusRequestEntityTooLarge, "bytes")
			s.requireEmpty(t, "vm")
			s.volumes.limit = test.size
			requireSays(t, s.put(t, "new", test.data), http.StatusInsufficientStorage, "too large")
			s.requireNone(t, "new")
		})
	}
}

// unread is a body that must not be read.
type unread struct{ t *testing.T }

func (u unread) Read([]byte) (int, error) {
	u.t.Error("a byte was taken")
	return 0, io.EOF
}

// TestLengthIsCheckedFirst: data that cannot fit is refused before any of it is read.
func TestLengthIsCheckedFirst(t *testing.T) {
	s := newServer(t)
	s.volumes.add(t, "vm", 10<<20)
	free := testtool.Must(osfile.AvailableSpace(s.volumes.dir))(t)
	for name, test := range map[string]struct {
		volume string
		length int64
		status int
	}{
		"of the volume": {"vm", 100 << 20, 413}, "of the storage": {"new", free * 2, 507},
	} {
		t.Run(name, func(t *testing.T) {
			r := testtool.Must(http.NewRequest(http.MethodPut, s.URL+"/volume/"+test.volume+"/data",
				unread{t}))(t)
			r.ContentLength = test.length
			r.Header.Set("Expect", "100-continue")
			transport := &http.Transport{ExpectContinueTimeout: 1 << 40}
			defer transport.CloseIdleConnections()
			back := testtool.Must(transport.RoundTrip(r))(t)
			defer back.Body.Close()
			text := testtool.Must(io.ReadAll(back.Body))(t)
			require.Equal(t, test.status, back.StatusCode, "%s", text)
			a := s.ask(t, http.MethodPut, "/volume/"+test.volume+"/data", nil, fieldComplete, "?0",
				fieldLength, strconv.FormatInt(test.length, 10))
			requireSays(t, a, test.status)
		})
	}
	s.requireEmpty(t, "vm")
	s.requireNone(t, "new")
}

func digest256(p []byte) string {
	sum := sha256.Sum256(p)
	return "sha-256=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
}

func digest512(p []byte) string {
	sum := sha512.Sum512(p)
	return "sha-512=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
}

func TestDigests(t *testing.T) {
	raw := rawDisk(2 << 20)
	for _, field := range []string{"Content-Digest", "Repr-Digest"} {
		for name, test := range map[string]struct {
			value  string
			status int
		}{
			"right":         {digest256(raw), 201},
			"right 512":     {digest512(raw), 201},
			"both":          {digest256(raw) + ", " + digest512(raw), 201},
			"with another":  {"md5=:AAAA:, " + digest256(raw) + ";x=1", 201},
			"wrong":         {digest256(raw[1:]), 400},
			"one is wrong":  {digest256(raw) + "," + digest512(raw[1:]), 400},
			"unknown":       {"md5=:AAAA:", 400},
			"no base64":     {"sha-256=:?:", 400},
			"too short":     {"sha-256=:AAAA:", 400},
			"not delimited": {"sha-256=abc", 400},
		} {
			t.Run(field+" "+name, func(t *testing.T) {
				t.Parallel()
				s := newServer(t)
				a := s.put(t, "vm", raw, field, test.value)
				requireSays(t, a, test.status)
				if test.status == 201 {
					require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
				} else {
					requireSays(t, a, test.status, field)
					s.requireNone(t, "vm")
				}
			})
		}
	}
}

// TestDigestInTrailer: a client that computes the digest while it sends puts it at the end (RFC
// 9530 section 2).
func TestDigestInTrailer(t *testing.T) {
	raw := rawDisk(2 << 20)
	for value, status := range map[string]int{digest256(raw): 201, digest512(raw): 201,
		digest256(raw[1:]): 400, "": 400} {
		s := newServer(t)
		r := testtool.Must(http.NewRequest(http.MethodPut, s.URL+"/volume/vm/data",
			io.MultiReader(bytes.NewReader(raw))))(t)
		r.Trailer = http.Header{"Repr-Digest": []string{value}}
		if value == "" {
			r.Trailer = http.Header{"Repr-Digest": nil} // announced, and does not come
		}
		back := testtool.Must(http.DefaultTransport.RoundTrip(r))(t)
		_ = back.Body.Close()
		require.Equal(t, status, back.StatusCode)
	}
}

// TestUnknownLength sends data in chunks, as curl does with standard input.
func TestUnknownLength(t *testing.T) {
	s := newServer(t)
	raw := rawDisk(7 << 20)
	a := s.ask(t, http.MethodPut, "/volume/vm/data", io.MultiReader(bytes.NewReader(raw)))
	requireSays(t, a, http.StatusCreated)
	require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
}

// TestCompleteFails: a volume that cannot be served awaits content again, and has what it has put
// there itself.
func TestCompleteFails(t *testing.T) {
	s := newServer(t)
	v := s.volumes.add(t, "vm", 0)
	v.fails = io.ErrClosedPipe
	require.NoError(t, os.WriteFile(filepath.Join(v.Dir(), ownName), nil, 0o600))
	requireSays(t, s.put(t, "vm", rawDisk(1<<20)), http.StatusInternalServerError)
	require.Equal(t, []string{ownName}, s.files(t, "vm"))
	v.fails = nil
	requireSays(t, s.put(t, "vm", rawDisk(1<<20)), http.StatusCreated)
}

// TestRecordStays: a volume that is served keeps its disk, whatever becomes of the upload's record.
func TestRecordStays(t *testing.T) {
	s, raw := newServer(t), rawDisk(1<<20)
	v := s.volumes.add(t, "vm", 0)
	v.done = func() { // it cannot be removed
		path := filepath.Join(v.Dir(), recordName)
		require.NoError(t, os.Remove(path))
		require.NoError(t, os.MkdirAll(filepath.Join(path, "below"), 0o700))
	}
	requireSays(t, s.put(t, "vm", raw), http.StatusCreated)
	content := testtool.Must(os.ReadFile(filepath.Join(v.Dir(), diskName)))(t)
	require.True(t, bytes.Equal(raw, content))
}

// TestForeignDisk: a file that no upload has made is not replaced.
func TestForeignDisk(t *testing.T) {
	s := newServer(t)
	v := s.volumes.add(t, "vm", 0)
	path := filepath.Join(v.Dir(), diskName)
	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	requireSays(t, s.put(t, "vm", rawDisk(1<<20)), http.StatusConflict, path)
	require.Equal(t, "precious", string(testtool.Must(os.ReadFile(path))(t)))
}

// TestForeignDiskMeanwhile: the same for a file that somebody makes while the data comes, also if
// the process is killed just before the data gets that name.
func TestForeignDiskMeanwhile(t *testing.T) {
	for _, killed := range []bool{false, true} {
		s, raw := newServer(t), rawDisk(1<<20)
		v := s.volumes.add(t, "vm", 0)
		at := s.create(t, "vm", int64(len(raw)))
		requireSays(t, s.append(t, at, 0, raw[:1<<19], false), http.StatusNoContent)
		require.NoError(t, os.WriteFile(v.Disk(), []byte("precious"), 0o600))
		if killed {
			rec := testtool.Must(loadRecord(v.Disk()))(t)
			rec.Placed = true
			require.NoError(t, rec.save(v.Disk()))
			s = s.restart(t)
		}
		requireSays(t, s.append(t, at, 1<<19, raw[1<<19:], true), http.StatusConflict, v.Disk())
		require.Equal(t, map[string]string{diskName: "precious"}, contents(t, v.Dir()))
		require.NoError(t, os.Remove(v.Disk()))
		requireSays(t, s.put(t, "vm", raw), http.StatusCreated)
		require.True(t, bytes.Equal(raw, s.disk(t, "vm")))
	}
}

// TestForeignDiskStaysAfterAnError: the same if the upload then cannot save its record, as when
// storage is full.
func TestForeignDiskStaysAfterAnError(t *testing.T) {
	s, raw := newServer(t), rawDisk(1<<20)
	v := s.volumes.add(t, "vm", 0)
	record := filepath.Join(v.Dir(), recordName)
	body := io.MultiReader(bytes.NewReader(raw), readerFunc(func([]byte) (int, error) {
		for testtool.Err(os.Lstat(v.Disk()+dataSuffix)) != nil { // its beginning has not come
			time.Sleep(time.Millisecond)
		}
		return 0, cmp.Or(os.WriteFile(v.Disk(), []byte("precious"), 0o600), os.Remove(record),
			os.MkdirAll(filepath.Join(record, "below"), 0o700), io.EOF)
	}))
	requireSays(t, s.ask(t, http.MethodPut, "/volume/vm/data", body),
		http.StatusInternalServerError)
	require.Equal(t, "precious", string(testtool.Must(os.ReadFile(v.Disk()))(t)))
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestMethods(t *testing.T) {
	s := newServer(t)
	a := s.ask(t, http.MethodOptions, "/volume/vm/data", nil)
	requireSays(t, a, http.StatusNoContent)
	require.Equal(t, partialUpload, a.header.Get("Accept-Patch"))
	require.Contains(t, a.header.Get(fieldLimit), "max-age=")
	requireSays(t, s.ask(t, http.MethodPost, "/volume/vm/data", nil), 405, "PUT")
	requireSays(t, s.ask(t, http.MethodPut, "/volume/vm/data/x", nil), 405, "PATCH")
	requireSays(t, s.put(t, "vm", rawDisk(512), "Content-Range", "bytes 0-511/1024"), 400)
	s.requireNone(t, "vm")
}
