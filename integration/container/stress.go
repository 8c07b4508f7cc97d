package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// stressDir is on the disk. The image's user owns it.
const stressDir = "/srv/stress"

// stress makes, renames and removes files until it is killed. It prints a line whenever its files
// are synced to storage. If there are files of an earlier run, it checks them and ends.
func stress() error {
	rounds, err := os.ReadDir(stressDir)
	if err == nil {
		return checkRounds(rounds)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	const kept = 4
	for round := 0; ; round++ {
		if err := makeRound(round); err != nil {
			return err
		}
		fmt.Println("synced", round)
		if err := os.RemoveAll(roundDir(round - kept)); err != nil {
			return err
		}
	}
}

func roundDir(round int) string { return filepath.Join(stressDir, fmt.Sprint(round)) }

// makeRound makes a directory of files. The last file says that the others are complete.
func makeRound(round int) error {
	dir := roundDir(round)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for i := range 40 {
		name := filepath.Join(dir, fmt.Sprint("file", i))
		if err := os.WriteFile(name+".new", content(name, i), 0o644); err != nil {
			return err
		}
		if err := os.Rename(name+".new", name); err != nil {
			return err
		}
		if err := os.Link(name, name+".link"); err != nil {
			return err
		}
		if i%3 == 0 {
			if err := os.Symlink(strings.Repeat("t", 10*i), name+".symlink"); i > 0 && err != nil {
				return err
			}
		}
	}
	syscall.Sync()
	if err := os.WriteFile(filepath.Join(dir, "complete"), nil, 0o644); err != nil {
		return err
	}
	syscall.Sync()
	return nil
}

// content returns the content of a file: up to 150 KiB.
func content(name string, i int) []byte {
	return []byte(strings.Repeat(name+"\n", 1+i*i*4))
}

// checkRounds checks the files of complete rounds.
func checkRounds(rounds []fs.DirEntry) error {
	checked := 0
	for _, r := range rounds {
		dir := filepath.Join(stressDir, r.Name())
		if _, err := os.Stat(filepath.Join(dir, "complete")); err != nil {
			continue
		}
		for i := range 40 {
			name := filepath.Join(dir, fmt.Sprint("file", i))
			for _, n := range []string{name, name + ".link"} {
				got, err := os.ReadFile(n)
				if errors.Is(err, fs.ErrNotExist) {
					break // the round was being removed
				}
				if err != nil {
					return err
				}
				if string(got) != string(content(name, i)) {
					return fmt.Errorf("%s has %d bytes, and not what was synced", n, len(got))
				}
			}
		}
		checked++
	}
	fmt.Println("checked", checked)
	return nil
}
