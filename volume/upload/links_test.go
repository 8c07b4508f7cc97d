package upload

import (
	"bytes"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// contents are the files of a directory, by name.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	all := map[string]string{}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		require.NoError(t, err)
		all[e.Name()] = string(text)
	}
	return all
}

// TestLinks: the directory of a volume may belong to another user, as that of a claim does. A link
// that appears in it during an upload never leads out of it, whatever its name is.
func TestLinks(t *testing.T) {
	for _, name := range []string{recordName, recordName + ".partial", dataName, qcow2Name,
		diskName, diskName + suffix + ".x"} {
		for what, data := range map[string][]byte{"good": rawDisk(1 << 20),
			"refused": bytes.Repeat([]byte("text\n"), 1000)} {
			t.Run(name+"/"+what, func(t *testing.T) {
				s := newServer(t)
				v := s.volumes.add(t, "v", 0)
				foreign := t.TempDir()
				file := filepath.Join(foreign, "file")
				require.NoError(t, os.WriteFile(file, []byte("keep"), 0o600))
				at := s.create(t, "v", int64(len(data)))
				link := filepath.Join(v.Dir(), name)
				_ = os.Remove(link)
				require.NoError(t, os.Symlink(file, link))
				a := s.append(t, at, 0, data, true)
				require.Equal(t, map[string]string{"file": "keep"}, contents(t, foreign), a.text)
				if name == recordName+".partial" && what == "good" {
					requireSays(t, a, http.StatusCreated)
					require.Equal(t, data, s.disk(t, "v"))
				}
			})
		}
	}
}

// TestDirectoryBecomesALink: while an upload waits for its rest, its directory is replaced by a
// link. Nothing is written or removed behind the link.
func TestDirectoryBecomesALink(t *testing.T) {
	for _, method := range []string{http.MethodPatch, http.MethodDelete, http.MethodPut} {
		s := newServer(t)
		v := s.volumes.add(t, "v", 0)
		data := rawDisk(1 << 20)
		at := s.create(t, "v", int64(len(data)))
		require.Equal(t, http.StatusNoContent, s.append(t, at, 0, data[:1<<19], false).status)

		foreign := t.TempDir()
		require.NoError(t, os.Rename(v.Dir(), v.Dir()+".away"))
		for _, name := range []string{recordName, dataName, qcow2Name, diskName} {
			text, err := os.ReadFile(filepath.Join(v.Dir()+".away", name))
			if err != nil {
				text = []byte("keep")
			}
			require.NoError(t, os.WriteFile(filepath.Join(foreign, name), text, 0o600))
		}
		require.NoError(t, os.Symlink(foreign, v.Dir()))
		before := contents(t, foreign)
		var a answer
		switch method {
		case http.MethodPatch:
			a = s.append(t, at, 1<<19, data[1<<19:], true)
		case http.MethodPut:
			a = s.put(t, "v", data)
		default:
			a = s.ask(t, method, at, nil)
		}
		require.True(t, maps.Equal(before, contents(t, foreign)), "%s %s", method, a.text)
		require.GreaterOrEqual(t, a.status, 400, method)
	}
}

// TestRecordCannotBeRead: a record that the system does not let us read now says nothing about its
// upload, which goes on later.
func TestRecordCannotBeRead(t *testing.T) {
	s := newServer(t)
	v := s.volumes.add(t, "v", 0)
	data := rawDisk(1 << 20)
	at := s.create(t, "v", int64(len(data)))
	require.Equal(t, http.StatusNoContent, s.append(t, at, 0, data[:1<<19], false).status)
	away := v.Dir() + ".away"
	require.NoError(t, os.Rename(v.Dir(), away))
	require.NoError(t, os.WriteFile(v.Dir(), nil, 0o600)) // ENOTDIR
	requireSays(t, s.append(t, at, 1<<19, data[1<<19:], true), http.StatusServiceUnavailable)
	require.Error(t, s.handler.Recover(t.Context(), []string{"v"}))
	require.NoError(t, os.Remove(v.Dir()))
	require.NoError(t, os.Rename(away, v.Dir()))
	requireSays(t, s.append(t, at, 1<<19, data[1<<19:], true), http.StatusCreated)
	require.Equal(t, data, s.disk(t, "v"))
}

// TestDataCannotBeOpened: an error of storage does not end an upload that is to go on.
func TestDataCannotBeOpened(t *testing.T) {
	s := newServer(t)
	v := s.volumes.add(t, "v", 0)
	data := rawDisk(1 << 20)
	at := s.create(t, "v", int64(len(data)))
	require.Equal(t, http.StatusNoContent, s.append(t, at, 0, data[:1<<19], false).status)
	file := filepath.Join(v.Dir(), dataName)
	require.NoError(t, os.Rename(file, file+".away"))
	require.NoError(t, os.Mkdir(file, 0o700)) // EISDIR
	requireSays(t, s.append(t, at, 1<<19, data[1<<19:], true), http.StatusServiceUnavailable)
	require.NoError(t, os.Remove(file))
	require.NoError(t, os.Rename(file+".away", file))
	requireSays(t, s.append(t, at, 1<<19, data[1<<19:], true), http.StatusCreated)
	require.Equal(t, data, s.disk(t, "v"))
}
