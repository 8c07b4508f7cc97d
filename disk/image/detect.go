package image

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"path"
	"slices"
	"strings"

	"kubevirt.io/disk/internal/words"
)

// Format is the format of a file's content, by the name that qemu-img uses for it.
type Format string

const (
	FormatRaw   Format = "raw"
	FormatQcow2 Format = "qcow2"
	// FormatUnknown is content that is not recognised, in a file without the name of a raw disk.
	FormatUnknown Format = "unknown"
)

// ParseFormat parses a format that a person has set. "" means that the content decides.
func ParseFormat(s string) (Format, error) {
	switch f := Format(s); f {
	case "", FormatRaw, FormatQcow2:
		return f, nil
	}
	return "", fmt.Errorf("format %q is unknown: use %s or %s", s, FormatRaw, FormatQcow2)
}

// FormatSource says how the format of an image was found.
type FormatSource string

const (
	// SourceContent means that the content decided. A raw disk has no magic; there the name
	// decided.
	SourceContent FormatSource = "content"
	// SourceServed means that the file was served raw, so a guest may have written its content.
	SourceServed FormatSource = "served"
	// SourceTold means that it comes from Options.Formats.
	SourceTold FormatSource = "told"
	// SourceDevice means that the file is a block device. A guest may have written its content.
	SourceDevice FormatSource = "device"
)

// Reason explains the source to a person.
func (s FormatSource) Reason() string {
	switch s {
	case SourceServed:
		return "it was served raw before"
	case SourceTold:
		return "it is set to be that"
	case SourceDevice:
		return "it is a block device"
	}
	return "its content says so"
}

const (
	headSize = 4096 // bytes of the beginning that detection reads
	tailSize = 512  // bytes of the end: formats with a footer
)

// rawExtensions are the name endings of raw disks. A file with one of them needs no magic.
var rawExtensions = []string{".raw", ".img", ".iso"}

// kind groups formats by what a person has to do about them.
type kind int

const (
	kindImage   kind = iota // a disk image that qemu-img can convert
	kindForeign             // a disk image that package foreign reads, so that it can be converted
	kindPacked              // a compressed file: unpack it
	kindArchive             // a container of files: extract the disk from it
	kindOther               // no disk at all
)

// magic is one way to recognise a format: data at an offset from the beginning, or from the end if
// the offset is negative.
type magic struct {
	format Format
	title  string // as messages say it, with its article
	kind   kind
	offset int
	data   string
	// for kindPacked, the command that unpacks it; for kindImage, qemu-img's name for the format if
	// that differs
	tool string
}

// magics is searched in order, and the first match decides. It has no partition tables, boot
// sectors or file systems, because raw disks contain them.
var magics = []magic{
	{FormatQcow2, "a qcow2 image", kindImage, 0, "QFI\xfb", ""},
	{"qed", "a QED image", kindImage, 0, "QED\x00", ""},
	{"vmdk", "a VMDK image", kindForeign, 0, "KDMV", ""},
	{"vmdk", "a VMDK image of ESX", kindImage, 0, "COWD", ""},
	{"vmdk", "a VMDK image of ESX (SESparse)", kindImage, 0, "\xbe\xba\xfe\xca\x00\x00\x00\x00",
		""},
	{"vmdk", "a VMDK descriptor", kindImage, 0, "# Disk DescriptorFile", ""},
	{"vhdx", "a VHDX image", kindForeign, 0, "vhdxfile", ""},
	{"vhd", "a VHD image", kindForeign, 0, "conectix", ""},
	{"vhd", "a fixed VHD image (its footer is at the end)", kindForeign, -512, "conectix", ""},
	{"vhd", "a fixed VHD image (its footer is at the end)", kindImage, -511, "conectix", "vpc"},
	{"vdi", "a VDI image of VirtualBox", kindForeign, 0x40, "\x7f\x10\xda\xbe", ""},
	{"parallels", "a Parallels image", kindImage, 0, "WithoutFreeSpace", ""},
	{"parallels", "a Parallels image", kindImage, 0, "WithouFreSpacExt", ""},
	{"bochs", "a Bochs image", kindImage, 0, "Bochs Virtual HD Image", ""},
	{"cloop", "a cloop image", kindImage, 0, "#!/bin/sh\n#V2.0 Format\nmodprobe cloop", ""},
	{"dmg", "an Apple disk image (its trailer is at the end)", kindImage, -512, "koly", ""},
	{"luks", "a LUKS encrypted volume", kindOther, 0, "LUKS\xba\xbe", ""},
	{"ewf", "an EnCase evidence file", kindOther, 0, "EVF\x09\x0d\x0a\xff\x00", ""},
	{"wim", "a Windows imaging (WIM) file", kindOther, 0, "MSWIM\x00\x00\x00", ""},
	{"simg", "an Android sparse image", kindPacked, 0, "\x3a\xff\x26\xed", "simg2img"},

	{"xz", "an xz compressed file", kindPacked, 0, "\xfd7zXZ\x00", "xz -d"},
	{"gzip", "a gzip compressed file", kindPacked, 0, "\x1f\x8b\x08", "gzip -d"},
	{"zstd", "a zstd compressed file", kindPacked, 0, "\x28\xb5\x2f\xfd", "zstd -d"},
	{"bzip2", "a bzip2 compressed file", kindPacked, 4, "1AY&SY", "bzip2 -d"},
	{"bzip2", "an empty bzip2 compressed file", kindPacked, 4, "\x17\x72\x45\x38\x50\x90",
		"bzip2 -d"},
	{"lz4", "an lz4 compressed file", kindPacked, 0, "\x04\x22\x4d\x18", "lz4 -d"},
	{"lz4", "an lz4 compressed file", kindPacked, 0, "\x02\x21\x4c\x18", "lz4 -d"},
	{"lzma", "an lzma compressed file", kindPacked, 0, "\x5d\x00\x00\x80\x00", "xz -d"},
	{"lzip", "an lzip compressed file", kindPacked, 0, "LZIP", "lzip -d"},
	{"lzop", "an lzop compressed file", kindPacked, 0, "\x89LZO\x00\r\n\x1a\n", "lzop -d"},
	{"compress", "a file made by compress", kindPacked, 0, "\x1f\x9d", "gzip -d"},

	{"zip", "a zip archive", kindArchive, 0, "PK\x03\x04", ""},
	{"zip", "an empty zip archive", kindArchive, 0, "PK\x05\x06", ""},
	{"zip", "a split zip archive", kindArchive, 0, "PK\x07\x08", ""},
	{"7z", "a 7-Zip archive", kindArchive, 0, "7z\xbc\xaf\x27\x1c", ""},
	{"rar", "a RAR archive", kindArchive, 0, "Rar!\x1a\x07", ""},
	{"tar", "a tar archive", kindArchive, 257, "ustar", ""},
	{"cpio", "a cpio archive", kindArchive, 0, "070701", ""},
	{"cpio", "a cpio archive", kindArchive, 0, "070702", ""},
	{"cpio", "a cpio archive", kindArchive, 0, "070707", ""},
	{"ar", "an ar archive or Debian package", kindArchive, 0, "!<arch>\n", ""},
	{"rpm", "an RPM package", kindArchive, 0, "\xed\xab\xee\xdb", ""},

	{"elf", "an ELF program or library", kindOther, 0, "\x7fELF", ""},
	{"lfs-pointer", "a Git LFS pointer, not the file that it stands for", kindOther, 0,
		"version https://git-lfs", ""},
	{"html", "an HTML page, perhaps a failed download", kindOther, 0, "<!DOCTYPE ", ""},
	{"html", "an HTML page, perhaps a failed download", kindOther, 0, "<!doctype ", ""},
	{"html", "an HTML page, perhaps a failed download", kindOther, 0, "<html", ""},
	{"http", "a server's answer with its header, not only its content", kindOther, 0, "HTTP/1.",
		""},
	{"http", "a server's answer with its header, not only its content", kindOther, 0, "HTTP/2 ",
		""},
}

// match reports whether the content that begins with head and ends with tail has the magic.
func (m *magic) match(head, tail []byte) bool {
	data, at := head, m.offset
	if at < 0 {
		data, at = tail, len(tail)+at
	}
	return at >= 0 && at+len(m.data) <= len(data) && string(data[at:at+len(m.data)]) == m.data
}

// detect recognises a file by its first headSize bytes and its last tailSize bytes. It returns nil
// for content without a magic. Such a file is a raw disk by its name.
func detect(head, tail []byte) *magic {
	for i := range magics {
		if magics[i].match(head, tail) {
			return &magics[i]
		}
	}
	return downloaded(head)
}

var (
	skippedFrames = magic{"zstd", "a zstd compressed file", kindPacked, 0, "", "zstd -d"}
	formOfBrowser = magic{"form", "a form as browsers send it, with a file in it", kindOther, 0, "",
		""}
	markedUp = magic{"html", "a page in HTML or XML, perhaps the error of a server", kindOther, 0,
		"", ""}
	jsonText = magic{"json", "a text in JSON, perhaps the error of a server", kindOther, 0, "", ""}
)

// downloaded recognises files that a failed or wrong transfer leaves in place of a disk, and that
// no fixed bytes tell: compressed data behind frames that zstd skips, an HTTP form, a server's
// error. It returns nil for anything else.
func downloaded(head []byte) *magic {
	if skipsToZstd(head) {
		return &skippedFrames
	}
	if bytes.HasPrefix(head, []byte("--")) &&
		bytes.Contains(bytes.ToLower(head), []byte("\ncontent-disposition:")) {
		return &formOfBrowser
	}
	if !looksLikeText(head) {
		return nil
	}
	text := strings.TrimLeft(string(head), " \t\r\n\f\ufeff")
	if len(text) < 2 {
		return nil
	}
	next := strings.TrimLeft(text[1:], " \t\r\n")
	switch c := text[1] | 0x20; {
	case text[0] == '<' && (c >= 'a' && c <= 'z' || text[1] == '!' || text[1] == '?'):
		return &markedUp
	case text[0] == '{' && next != "" && strings.ContainsAny(next[:1], "\"}"),
		text[0] == '[' && next != "" && strings.ContainsAny(next[:1], "\"{]"):
		return &jsonText
	}
	return nil
}

// skipsToZstd reports whether a file begins with frames that zstd skips, as pzstd makes them, and
// then has zstd's data, as far as head shows.
func skipsToZstd(head []byte) bool {
	const magic, frameHeader = "\x2a\x4d\x18", 8
	rest := head
	for len(rest) >= frameHeader && rest[0]&0xf0 == 0x50 && string(rest[1:4]) == magic {
		skip := frameHeader + int64(binary.LittleEndian.Uint32(rest[4:]))
		if skip >= int64(len(rest)) {
			return true
		}
		rest = rest[skip:]
	}
	const data = "\x28\xb5\x2f\xfd"
	n := min(len(rest), len(data))
	return len(rest) < len(head) && string(rest[:n]) == data[:n]
}

// FormatOf recognises data by its first bytes: DetectSize of them, or all of shorter data. It
// returns "" for data without a magic, such as a raw disk.
func FormatOf(head []byte) Format {
	if m := detect(head[:min(len(head), headSize)], nil); m != nil {
		return m.format
	}
	return ""
}

// wrappings are the formats that package unpack takes off.
var wrappings = []Format{"gzip", "xz", "zstd", "bzip2", "tar"}

// IsWrapping reports whether a format is a wrapping: pull, upload, push and convert take the disk
// out of it.
func IsWrapping(f Format) bool { return slices.Contains(wrappings, f) }

// wrappingExtensions are the name endings of compressed files and of archives.
var wrappingExtensions = []string{".gz", ".xz", ".zst", ".zstd", ".bz2", ".tgz", ".txz", ".tzst",
	".tbz", ".tbz2", ".tar", ".ova"}

// UnwrappedName is the name of a file without the ending of one wrapping. For a VMDK image, it is
// the name of a raw disk.
func UnwrappedName(name string) string {
	if ext := path.Ext(name); len(ext) < len(name) && strings.EqualFold(ext, ".vmdk") {
		return strings.TrimSuffix(name, ext) + ".raw"
	}
	for _, ext := range wrappingExtensions {
		if n := len(name) - len(ext); n > 0 && strings.EqualFold(name[n:], ext) {
			return name[:n]
		}
	}
	return name
}

// unwrap is the command that takes the disk out of a file.
func unwrap(name string) string {
	to := UnwrappedName(UnwrappedName(name))
	if to == name || !HasRawExtension(to) && !strings.EqualFold(path.Ext(to), ".qcow2") {
		to += ".qcow2"
	}
	return fmt.Sprintf("\"kubevirt-disk convert %s %s\"", words.Shell(name), words.Shell(to))
}

// IsImage reports whether a format is one of disk images.
func IsImage(f Format) bool {
	return slices.ContainsFunc(magics, func(m magic) bool {
		return m.format == f && (m.kind == kindImage || m.kind == kindForeign)
	})
}

// IsForeign reports whether a format is one of images that Options.Foreign accepts.
func IsForeign(f Format) bool {
	return slices.ContainsFunc(magics, func(m magic) bool {
		return m.format == f && m.kind == kindForeign
	})
}

// refuse explains why a file of a known format is not served.
func (m *magic) refuse(name string, use fileUse) *Error {
	e := &Error{Name: name, Format: m.format, Reason: "is " + m.title}
	stem := strings.TrimSuffix(name, path.Ext(name))
	switch {
	case m.format == "tar" && strings.EqualFold(path.Ext(name), ".ova"):
		e.Reason = "is an OVA appliance, a tar archive"
		e.Action = "take the disk out of it with " + unwrap(name) + " " +
			use.advice("before it is added", "first", "before it is added")
	case m.format == "tar" && strings.EqualFold(path.Ext(name), ".oci-archive"):
		e.Reason = "is an OCI archive, a tar archive with a container image"
		e.Action = "name it as an image, oci-archive:" + words.Shell(name)
	case IsWrapping(m.format):
		e.Action = "take the disk out of it with " + unwrap(name) + " " +
			use.advice("before it is added", "first", "before it is added")
	case m.kind == kindForeign:
		e.Action = fmt.Sprintf("convert it with \"kubevirt-disk convert %s %s\"", words.Shell(name),
			words.Shell(stem+".qcow2"))
	case m.kind == kindImage:
		tool := cmp.Or(m.tool, string(m.format))
		e.Action = fmt.Sprintf("convert it with \"qemu-img convert -f %s -O qcow2 %s %s\"",
			tool, words.Shell(name), words.Shell(stem+".qcow2"))
	case m.kind == kindPacked:
		e.Action = fmt.Sprintf("unpack it with %q %s", m.tool,
			use.advice("before it is added", "first", "before it is added"))
	case m.kind == kindArchive:
		e.Action = "extract the disk image from it, and " +
			use.advice("add only that", "name that", "put that in its place")
	case m.format == "luks":
		e.Action = "decrypt it first: a key cannot be given to the server"
	default:
		e.Action = use.another()
	}
	if use != useBacking && HasRawExtension(name) {
		e.Action += "; or " + sayRaw(use, "that")
	}
	return e
}

// sayRaw tells a person how to declare that a file is a raw disk, and that a guest wrote the data
// that looks like another format.
func sayRaw(use fileUse, what string) string {
	how := use.advice(`set "format: raw" for it under "disks" in the configuration file`,
		`say --format raw (for serve, "format: raw" under "disks" in the configuration file)`, "")
	return how + " if it is a raw disk and a guest wrote " + what
}

// refuseUnknown explains why a file is refused that has neither a magic nor the name of a raw disk.
func refuseUnknown(name string, head []byte, use fileUse) *Error {
	e := &Error{Name: name, Format: FormatUnknown}
	switch ext := strings.ToLower(path.Ext(name)); {
	case len(head) == 0:
		e.Reason = "is empty"
		e.Action = use.another()
	case ext == ".qcow2" || ext == ".qcow":
		e.Reason = fmt.Sprintf("is named %s but does not begin with a qcow2 header", ext)
		e.Action = "fetch or build it again, or name it .raw if that is what it is"
	case looksLikeText(head):
		e.Reason = "is a text file, not a disk image"
		e.Action = use.another()
	default:
		e.Reason = "is not a known format, and its name does not say that it is a raw disk"
		e.Action = "name it .raw, .img or .iso if it is one, otherwise " + use.another()
	}
	return e
}

// HasRawExtension reports whether the name says that the file is a raw disk. Case does not matter,
// because ISO images are often named in capitals.
func HasRawExtension(name string) bool {
	return slices.Contains(rawExtensions, strings.ToLower(path.Ext(name)))
}

// PassOver reports whether a file next to disks is not meant as a disk: an empty file such as
// .keep, or a hidden file that is neither qcow2 nor named like a raw disk. An empty file with the
// name of a disk counts as one: a disk is expected there.
func PassOver(name string, size int64, isQcow2 bool) bool {
	base := path.Base(name)
	if strings.HasPrefix(base, ".") {
		return size == 0 || !isQcow2 && !HasRawExtension(base)
	}
	ext := strings.ToLower(path.Ext(base))
	return size == 0 && !HasRawExtension(base) && ext != ".qcow2" && ext != ".qcow"
}

// looksLikeText reports whether head has only the control characters of texts, in any encoding.
// head may end in the middle of a character. A raw disk does not look like that: its sectors have
// zeros, and random data has other control characters.
func looksLikeText(head []byte) bool {
	if bytes.HasPrefix(head, []byte("\xff\xfe")) || bytes.HasPrefix(head, []byte("\xfe\xff")) {
		head = everySecond(head) // UTF-16
	}
	return !slices.ContainsFunc(head, func(c byte) bool {
		return c == 0x7f || c < ' ' && !strings.ContainsRune("\n\r\t\f\v\b\x1b", rune(c))
	})
}

// everySecond removes the zero bytes that follow or precede Latin characters in a text in UTF-16.
func everySecond(head []byte) (text []byte) {
	for i := 2; i+1 < len(head); i += 2 {
		if head[i] != 0 {
			text = append(text, head[i])
		}
		if head[i+1] != 0 || head[i] == 0 {
			text = append(text, head[i+1])
		}
	}
	return text
}
