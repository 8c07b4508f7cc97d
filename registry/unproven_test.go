package registry

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/disk/disktest/packtest"
	"kubevirt.io/disk/registry/registrytest"
)

// part answers with a range of a file, and breaks the connection after so many bytes (-1: never).
// The tag "" is none.
func part(file []byte, tag string, most int) fault {
	return func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		if tag != "" {
			w.Header().Set("ETag", tag)
		}
		if most < 0 {
			most = len(file)
		}
		return cut(most)(w, r, file)
	}
}

// whole answers with all of a file, whatever was asked for.
func whole(file []byte) fault {
	return func(w http.ResponseWriter, r *http.Request, _ []byte) bool {
		w.Header().Set("Content-Length", fmt.Sprint(len(file)))
		return registrytest.Whole(w, r, file)
	}
}

// TestPullBrokenWithoutDigest: nobody knows the digest, and the connection breaks. What is there in
// the end is one file: the rest of another one never gets below its name, whoever answers, and
// whatever he says about it.
func TestPullBrokenWithoutDigest(t *testing.T) {
	file := noise(90, 1<<20)
	other := flipped(file, 900000) // the same size, and the same beginning
	early := flipped(file, 100)
	packed, packedOther := packtest.Xz(file), packtest.Xz(noise(91, 1<<20))
	size := min(len(packed), len(packedOther))
	const a, b = webFile + "?a", webFile + "?b"
	mirror := func(t *testing.T, answers ...fault) fault { // another server, which a redirect names
		w := newWeb(t, file)
		w.Fail(answers...)
		return registrytest.Redirects(w.Server.URL + webFile)
	}
	for name, c := range map[string]struct {
		server func(t *testing.T) []fault
		file   []byte // what must come; nil: an error
		again  bool   // it is said that it begins again
	}{
		"the same validator": {file: file, server: func(*testing.T) []fault {
			return []fault{part(file, `"1"`, 300000), part(file, `"1"`, 300000)}
		}},
		"no validator": {file: file, again: true, server: func(*testing.T) []fault {
			return []fault{part(file, "", 300000), part(file, "", 1), part(file, "", -1)}
		}},
		"a weak validator": {file: file, again: true, server: func(*testing.T) []fault {
			return []fault{part(file, `W/"1"`, 300000), part(file, `W/"1"`, 500000),
				part(file, `W/"1"`, -1), part(file, `W/"1"`, -1)}
		}},
		"a weak validator, another file": {again: true, server: func(*testing.T) []fault {
			return []fault{part(early, `W/"1"`, 300000), part(file, `W/"1"`, -1)}
		}},
		"no validator, another file": {again: true, server: func(*testing.T) []fault {
			return []fault{part(early, "", 300000), part(file, "", -1), part(file, "", -1)}
		}},
		"another file, and no ranges": {server: func(*testing.T) []fault {
			return []fault{part(early, `"1"`, 300000), whole(file)}
		}},
		"the same file, and no ranges": {file: file, server: func(*testing.T) []fault {
			return []fault{part(file, `"1"`, 300000), whole(file)}
		}},
		"an end that differs": {file: file, again: true, server: func(*testing.T) []fault {
			return []fault{part(other, `"2"`, 300000)} // none of that end has come
		}},
		"an end that differs, late": {again: true, server: func(*testing.T) []fault {
			return []fault{part(other, `"2"`, 950000)}
		}},
		"mirrors with two files": {again: true, server: func(t *testing.T) []fault {
			return []fault{mirror(t, part(early, `"old"`, 300000)), mirror(t), mirror(t)}
		}},
		"mirrors with two files and one tag": {again: true, server: func(t *testing.T) []fault {
			return []fault{mirror(t, part(early, `"1"`, 300000)), mirror(t), mirror(t)}
		}},
		"mirrors with one file": {file: file, again: true, server: func(t *testing.T) []fault {
			return []fault{mirror(t, part(file, `"x"`, 300000)), mirror(t), mirror(t)}
		}},
		"mirrors before anything has come": {file: file, server: func(t *testing.T) []fault {
			return []fault{mirror(t, part(early, `"old"`, 0)), mirror(t)}
		}},
		"a mirror that changes and back": {file: file, again: true, server: func(
			t *testing.T) []fault {
			to := mirror(t, part(file, `"1"`, 300000), part(early, `"2"`, -1))
			return []fault{to, to, to}
		}},
		"queries that name files": {again: true, server: func(*testing.T) []fault {
			return []fault{registrytest.Redirects(a), part(early, `"1"`, 300000),
				registrytest.Redirects(b), part(file, `"1"`, -1),
				registrytest.Redirects(b), part(file, `"1"`, -1)}
		}},
		"compressed": {again: true, server: func(*testing.T) []fault {
			late := packedOther[:size]
			return []fault{part(packed[:size], `"1"`, size/2), part(late, `"2"`, -1),
				part(late, `"2"`, -1)}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWeb(t, file)
			if name == "compressed" {
				w.Put(webFile, packed[:size], `"1"`)
			}
			w.Fail(append([]fault{nil}, c.server(t)...)...) // the first tells the size
			dir, digest, err := w.pull(t, w.Server.URL+webFile)
			require.Equal(t, c.again, strings.Contains(strings.Join(w.told, "\n"), "begins again"),
				"%q", w.told)
			if c.file == nil {
				require.ErrorContains(t, err, "it was replaced")
				emptyDir(t, dir)
				return
			}
			require.NoError(t, err)
			require.Equal(t, digestOf(file), digest)
			onlyFile(t, dir, "out.raw", file)
		})
	}
}
