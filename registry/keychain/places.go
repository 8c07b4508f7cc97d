package keychain

import (
	"errors"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// place is where credentials may be: a file, or the text of a variable.
type place struct {
	name  string
	text  string // instead of the content of a file
	named bool   // a variable names the file, so it should exist
}

// read reads the credentials. A file that does not exist has none.
func (p place) read() (*credentialFile, error) {
	if p.text != "" {
		return parseConfig(p.name, []byte(p.text))
	}
	c, err := readConfig(p.name)
	missing := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
	if missing && !p.named {
		return &credentialFile{place: p.name}, nil
	}
	return c, err
}

// usualPlaces are the places of credentials for docker, podman, skopeo and the kubelet.
func usualPlaces() []place {
	home, err := os.UserHomeDir()
	if err != nil {
		if u, err := user.Current(); err == nil {
			home = u.HomeDir
		}
	}
	return placesOf(os.Getenv, home, os.Getuid())
}

// placesOf are the places for a user. Places that a variable names come before the others. As for
// these programs, REGISTRY_AUTH_FILE replaces the file of the login session, and DOCKER_CONFIG
// docker's directory in the home. The working directory is none, although the kubelet looks there:
// anybody may have put a file there, which may name programs to run.
func placesOf(env func(string) string, home string, uid int) []place {
	const podman = "containers/auth.json"
	var all []place
	if text := env("DOCKER_AUTH_CONFIG"); text != "" {
		all = append(all, place{name: "DOCKER_AUTH_CONFIG", text: text})
	}
	session := env("REGISTRY_AUTH_FILE")
	if session != "" {
		all = append(all, place{name: session, named: true})
	}
	docker := env("DOCKER_CONFIG")
	if docker != "" {
		all = append(all, place{name: filepath.Join(docker, "config.json")})
	}
	add := func(dir, file string) {
		if dir != "" {
			all = append(all, place{name: filepath.Join(dir, file)})
		}
	}
	if id := strconv.Itoa(uid); session == "" {
		runtime := env("XDG_RUNTIME_DIR")
		if runtime == "" {
			runtime = filepath.Join("/run/user", id) // as podman
		}
		add(runtime, podman)
		add("/run/containers", filepath.Join(id, "auth.json"))
	}
	if config := env("XDG_CONFIG_HOME"); config != "" {
		add(config, podman)
	} else {
		add(home, filepath.Join(".config", podman))
	}
	if docker == "" {
		add(home, ".docker/config.json")
	}
	add(home, legacyConfig)
	if uid == 0 { // the kubelet's own files
		add("/var/lib/kubelet", "config.json")
		add("/var/lib/kubelet", legacyConfig)
		add("/", ".docker/config.json")
		add("/", legacyConfig)
	}
	return all
}
