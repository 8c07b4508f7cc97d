package daemon

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/daemon/options/optionstest"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/registry/registrytest"
	"kubevirt.io/disk/registry/signature"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/status"
)

// TestSignedImage: a daemon serves an image that the key has signed, and its log, /status and
// metrics name the key. It does not start with one that nobody has signed.
func TestSignedImage(t *testing.T) {
	l := registrytest.NewLying(t)
	l.NewImage(t, bytes.Repeat([]byte("a disk  "), 8192))
	key, file := registrytest.NewSigner(t)
	ref := testtool.Must(transport.ParseReference(l.Host() + "/vm/a:1"))(t)
	opt := testOptions(t)
	opt.Streams = options.Streams{References: []transport.Reference{ref},
		Registry:   transport.Options{Insecure: []string{l.Host()}},
		Signatures: signature.Options{Keys: []string{file}},
		CacheDir:   filepath.Join(filepath.Dir(opt.WorkDir), "cache"), CacheSize: 1 << 30}
	r := launch(t, opt)
	err := <-r.ended
	require.ErrorContains(t, err, "has no signature")
	require.Zero(t, l.Requests("/blobs/"))

	l.Sign(t, l.Tags["1"].Digest.String(), key)
	r = start(t, opt)
	want := registrytest.Fingerprint(t, key)
	lines := r.log.FilterField(zap.String("signed_by", want)).All()
	require.Len(t, lines, 1)
	get := func(path string) []byte {
		res := testtool.Must(http.Get("http://" + r.PagesAddress() + path))(t)
		defer res.Body.Close()
		return testtool.Must(io.ReadAll(res.Body))(t)
	}
	var now status.Status
	require.NoError(t, json.Unmarshal(get("/status"), &now))
	require.Len(t, now.LUNs, 1)
	require.Equal(t, want, now.LUNs[0].SignedBy)
	require.Contains(t, string(get("/metrics")), `kubevirt_disk_lun_signed{image="`+ref.String()+
		`",key="`+want+`",lun="1"} 1`)
	require.NoError(t, r.end())
}

// TestSignedVolume: a volume from an image is made only if the key has signed that, and nothing of
// another image is read.
func TestSignedVolume(t *testing.T) {
	l := registrytest.NewLying(t)
	content := bytes.Repeat([]byte("a disk  "), 8192)
	l.NewImage(t, content)
	key, file := registrytest.NewSigner(t)
	opt := testOptions(t)
	opt.Streams = options.Streams{Registry: transport.Options{Insecure: []string{l.Host()}},
		Signatures: signature.Options{Keys: []string{file}},
		CacheDir:   filepath.Join(filepath.Dir(opt.WorkDir), "cache"), CacheSize: 1 << 30}
	opt.Volumes = &options.Volumes{Listen: optionstest.Loopback()}
	r := start(t, opt)
	ask := func(method, body string) (int, string) {
		req := testtool.Must(http.NewRequest(method,
			"http://"+r.Status().Volumes.Address+"/volume/vm", strings.NewReader(body)))(t)
		req.Header.Set("Content-Type", "application/json")
		res := testtool.Must(http.DefaultClient.Do(req))(t)
		defer res.Body.Close()
		text := testtool.Must(io.ReadAll(res.Body))(t)
		return res.StatusCode, string(text)
	}
	put := func() (code int, text string) {
		code, text = ask(http.MethodPut, `{"from": {"reference": "`+l.Host()+`/vm/a:1"}}`)
		testtool.Eventually(t, func() bool {
			if code == http.StatusAccepted {
				code, text = ask(http.MethodGet, "")
			}
			return code != http.StatusAccepted
		})
		return code, text
	}
	code, text := put()
	require.GreaterOrEqual(t, code, 400, text)
	require.Contains(t, text, "has no signature")
	require.Zero(t, l.Requests("/blobs/"))
	require.Empty(t, r.disks.Served())

	l.Sign(t, l.Tags["1"].Digest.String(), key)
	code, text = put()
	require.Less(t, code, 300, text)
	p := make([]byte, len(content))
	require.NoError(t, testtool.Err(r.disks.Served()[0].Instance().ReadAt(t.Context(), p, 0)))
	require.True(t, bytes.Equal(content, p))
	require.NoError(t, r.end())
}
