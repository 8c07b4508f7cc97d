package guestinit

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	passwdFile = "root:x:0:0:root:/root:/bin/sh\n" +
		"# comment\nbad\nwww:x:33:33:www:/var/www:/bin/false\nbare:x:70000:70001\n"
	groupFile = "root:x:0:\nwww:x:33:\nadm:x:4:www,bare\nlog:x:5:bare,www\nother:x:6:wwwx\n" +
		"twice:x:4:www\n"
)

func TestFindUser(t *testing.T) {
	for spec, want := range map[string]identity{
		"":          {home: "/root"},
		"root":      {home: "/root"},
		"www":       {uid: 33, gid: 33, groups: []int{4, 5}, home: "/var/www"},
		"33":        {uid: 33, gid: 33, groups: []int{4, 5}, home: "/var/www"},
		"www:":      {uid: 33, gid: 33, groups: []int{4, 5}, home: "/var/www"},
		"www:log":   {uid: 33, gid: 5, home: "/var/www"},
		"www:77":    {uid: 33, gid: 77, home: "/var/www"},
		"bare":      {uid: 70000, gid: 70001, groups: []int{4, 5}, home: "/"},
		"4000:4001": {uid: 4000, gid: 4001, home: "/"},
		"4000":      {uid: 4000, home: "/"},
	} {
		got, err := findUser(spec, passwdFile, groupFile)
		require.NoError(t, err)
		require.Equal(t, want, got, spec)
	}
	_, err := findUser("nobody", passwdFile, groupFile)
	require.ErrorContains(t, err, `user "nobody" is not in its /etc/passwd`)
	_, err = findUser("www:nobody", passwdFile, groupFile)
	require.ErrorContains(t, err, `group "nobody" is not in its /etc/group`)
	id, err := findUser("", "", "")
	require.NoError(t, err)
	require.Equal(t, identity{home: "/root"}, id, "an image without passwd")
}

func FuzzFindUser(f *testing.F) {
	f.Add("www:log", passwdFile, groupFile)
	f.Fuzz(func(t *testing.T, spec, passwd, group string) {
		id, err := findUser(spec, passwd, group)
		if err == nil {
			require.True(t, id.uid >= 0 && id.uid <= maxID && id.gid >= 0 && id.gid <= maxID)
		}
	})
}
