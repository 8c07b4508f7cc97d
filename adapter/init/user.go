package guestinit

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
)

// identity is the user and the groups of the entry point.
type identity struct {
	uid, gid int
	groups   []int // supplementary
	home     string
}

// maxID is the largest number of a user or a group: -1 means none.
const maxID = 1<<32 - 2

// findUser looks up the image's user: USER or USER:GROUP, each a name or a number, in the contents
// of the image's passwd and group. As in container runtimes, a number may be unknown, and the
// supplementary groups are those of the user's name, unless a group is given.
func findUser(spec, passwd, group string) (identity, error) {
	user, groupName, hasGroup := strings.Cut(spec, ":")
	user = cmp.Or(user, "0")
	id := identity{home: "/"}
	number, numeric := parseID(user)
	name := ""
	for fields := range entries(passwd, 4) {
		uid, ok := parseID(fields[2])
		gid, gidOK := parseID(fields[3])
		if !ok || !gidOK || fields[0] != user && (!numeric || uid != number) {
			continue
		}
		name, id.uid, id.gid = fields[0], uid, gid
		if len(fields) > 5 && fields[5] != "" {
			id.home = fields[5]
		}
		break
	}
	switch {
	case name != "":
	case numeric:
		id.uid = number
		if number == 0 {
			id.home = "/root"
		}
	default:
		return id, fmt.Errorf("the image's user %q is not in its /etc/passwd", user)
	}
	if !hasGroup || groupName == "" {
		id.groups = groupsOf(name, group)
		return id, nil
	}
	var err error
	id.gid, err = findGroup(groupName, group)
	return id, err
}

func findGroup(name, group string) (int, error) {
	for fields := range entries(group, 3) {
		if gid, ok := parseID(fields[2]); ok && fields[0] == name {
			return gid, nil
		}
	}
	if gid, ok := parseID(name); ok {
		return gid, nil
	}
	return 0, fmt.Errorf("the image's group %q is not in its /etc/group", name)
}

// groupsOf are the groups that list a user as their member.
func groupsOf(user, group string) (groups []int) {
	for fields := range entries(group, 4) {
		gid, ok := parseID(fields[2])
		member := user != "" && slices.Contains(strings.Split(fields[3], ","), user)
		if ok && member && !slices.Contains(groups, gid) {
			groups = append(groups, gid)
		}
	}
	return groups
}

// entries yields the lines of passwd or group that have at least n fields.
func entries(text string, n int) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		for line := range strings.Lines(text) {
			fields := strings.Split(strings.TrimSpace(line), ":")
			if len(fields) >= n && fields[0] != "" && !yield(fields) {
				return
			}
		}
	}
}

func parseID(text string) (int, bool) {
	n, err := strconv.ParseInt(text, 10, 64)
	return int(n), err == nil && n >= 0 && n <= maxID
}

// maxUserFile limits the part of passwd or group that is read, in bytes.
const maxUserFile = 16 << 20

// readUserFile reads a file of the image, which may be missing.
func readUserFile(name string) string {
	info, err := os.Stat(name)
	if err != nil || !info.Mode().IsRegular() {
		return ""
	}
	f, err := os.Open(name)
	if err != nil {
		return ""
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, maxUserFile)) // the text before an error counts
	return string(text)
}
