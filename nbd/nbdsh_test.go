package nbd

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// everyRequest is a script for nbdsh that negotiates by hand, and then tries every request of
// libnbd in strict and in lax mode.
const everyRequest = `
import errno
h.set_opt_mode(True)
h.set_handshake_flags(nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE | nbd.HANDSHAKE_FLAG_NO_ZEROES)
h.set_full_info(True)
h.connect_uri(URI)
assert h.get_protocol() == 'newstyle-fixed'
assert h.get_structured_replies_negotiated()
names = []
assert h.opt_list(lambda name, text: names.append(name)) == 2
assert names == ['disk1.raw', 'disk2.raw'], names
def fails(f, code):
    try:
        f()
    except nbd.Error as e:
        assert e.errnum == code, (e, e.errnum)
        return
    assert False
h.set_export_name('nothing')
fails(h.opt_info, errno.ENOENT)
h.set_export_name('disk1.raw')
h.opt_info()
assert h.get_size() == 16 << 20
assert h.get_canonical_export_name() == 'disk1.raw'
assert h.get_export_description() == 'LUN 1, disk1.raw'
contexts = []
h.opt_list_meta_context(contexts.append)
assert contexts == ['base:allocation', 'qemu:allocation-depth'], contexts
h.add_meta_context('base:allocation')
h.add_meta_context('qemu:allocation-depth')
h.add_meta_context('x-unknown:context')
h.opt_go()
assert h.can_meta_context('base:allocation')
for can in (h.can_cache, h.can_df, h.can_fast_zero, h.can_flush, h.can_fua, h.can_multi_conn,
            h.can_trim, h.can_zero):
    assert can(), can
assert not h.is_read_only()
assert h.get_block_size(nbd.SIZE_MINIMUM) == 512
assert h.get_block_size(nbd.SIZE_PREFERRED) == 4096
assert h.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20

h.pwrite(b'a' * 65536, 65536)
h.pwrite(b'b' * 512, 512, nbd.CMD_FLAG_FUA)
assert h.pread(65536, 65536) == b'a' * 65536
chunks = []
buf = h.pread_structured(1 << 20, 0, lambda b, off, status, err:
                         chunks.append((off, len(b), status)))
assert buf[512:1024] == b'b' * 512 and buf[65536:131072] == b'a' * 65536 and buf[131072:] == \
    bytes((1 << 20) - 131072)
assert any(c[2] == nbd.READ_HOLE for c in chunks), chunks
chunks = []
h.pread_structured(1 << 20, 0, lambda b, off, status, err: chunks.append(status), nbd.CMD_FLAG_DF)
assert chunks == [nbd.READ_DATA], chunks
h.flush()
h.cache(1 << 20, 0)
h.zero(4096, 65536)
h.zero(4096, 69632, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
h.zero(4096, 73728, nbd.CMD_FLAG_FAST_ZERO)
fails(lambda: h.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE), errno.ENOTSUP)
assert h.pread(16384, 65536) == bytes(12288) + b'a' * 4096
h.trim(16384, 65536, nbd.CMD_FLAG_FUA)
assert h.can_meta_context('qemu:allocation-depth')
status = {}
h.block_status(16 << 20, 0, lambda name, off, e, err: status.update({name: e}))
assert status['qemu:allocation-depth'] == [16 << 20, 1], status
entries = status['base:allocation']
assert sum(entries[0::2]) == 16 << 20, entries
assert set(entries[1::2]) == {0, nbd.STATE_HOLE | nbd.STATE_ZERO}, entries
status = {}
h.block_status(1 << 20, 0, lambda name, off, e, err: status.update({name: e}), nbd.CMD_FLAG_REQ_ONE)
assert [len(e) for e in status.values()] == [2, 2], status

h.set_strict_mode(0) # the server has to find what is wrong
h.pwrite(b'x' * 7, 8001)
assert h.pread(9, 8000) == b'\0' + b'x' * 7 + b'\0'
for f, code in ((lambda: h.pread(512, 16 << 20), errno.EINVAL),
                (lambda: h.pwrite(b'x' * 512, 16 << 20), errno.ENOSPC),
                (lambda: h.zero(512, 16 << 20), errno.ENOSPC),
                (lambda: h.trim(512, 16 << 20), errno.EINVAL),
                (lambda: h.cache(512, 16 << 20), errno.EINVAL),
                (lambda: h.pread(512, 0, 1 << 14), errno.EINVAL),
                (lambda: h.pwrite(b'x', 0, nbd.CMD_FLAG_DF), errno.EINVAL),
                (lambda: h.flush(nbd.CMD_FLAG_NO_HOLE), errno.EINVAL),
                (lambda: h.block_status(0, 0, lambda *a: 0), errno.EINVAL)):
    fails(f, code)
    h.flush()
h.shutdown()

for flags in (0, nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE, nbd.HANDSHAKE_FLAG_NO_ZEROES):
    c = nbd.NBD()
    c.set_handshake_flags(flags)
    c.connect_uri(URI)
    assert c.pread(512, 512) == b'b' * 512
    c.shutdown()
c = nbd.NBD()
c.set_request_structured_replies(False)
c.connect_uri(URI)
assert not c.get_structured_replies_negotiated()
assert c.pread(1 << 20, 0)[512:1024] == b'b' * 512
c.shutdown()
c = nbd.NBD()
c.set_opt_mode(True)
c.connect_uri(URI)
c.opt_abort()
print('every request')
`

// TestEveryRequestOfLibnbd has libnbd check every answer.
func TestEveryRequestOfLibnbd(t *testing.T) {
	v := serve(t, 2, nil)
	script := "URI = '" + v.uri("disk1.raw") + "'\n" + everyRequest
	out, err := Nbdsh(t, "-c", script).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "every request")
}
