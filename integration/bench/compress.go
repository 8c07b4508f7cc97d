package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// compressions are the methods of compressing qcow2, by their names for both programs.
var compressions = []string{"zstd", "zlib"}

// measureCompression stores a raw disk as a compressed qcow2 image.
func measureCompression(ctx context.Context, s settings) error {
	raw := filepath.Join(s.cache, "images", "source.raw")
	if err := makeContent(raw, imageData); err != nil {
		return err
	}
	qemu := func(method string, options ...string) func(source, dest string) []string {
		return func(source, dest string) []string {
			command := append([]string{"qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-c",
				"-o", "compression_type=" + method}, options...)
			return append(command, source, dest)
		}
	}
	out := table{head: []string{"method", "command", "time", "to qemu-img convert -c", "CPU",
		"to qemu-img convert -c", "size", "to qemu-img convert -c", "peak memory"}}
	dest := filepath.Join(s.cache, "compressed.qcow2")
	defer os.Remove(dest)
	for _, method := range compressions {
		if !s.loads.MatchString(method + ", compress") {
			continue
		}
		programs := []expander{
			{"kubevirt-disk convert", func(source, dest string) []string {
				return []string{s.server, "convert", "--compress=" + method, source, dest}
			}},
			{"qemu-img convert -c", qemu(method)},
			{"qemu-img convert -c -m 8 -W", qemu(method, "-m", "8", "-W")},
		}
		if s.before != "" {
			programs = append(programs, expander{"kubevirt-disk convert, " + beforeName,
				func(source, dest string) []string {
					return []string{s.before, "convert", "--compress=" + method, source, dest}
				}})
		}
		measured, sizes := make([][]usage, len(programs)), make([]int64, len(programs))
		for round := range s.rounds {
			for _, i := range rand.Perm(len(programs)) { // as in measureExpansion
				u, err := expand(ctx, programs[i].command(raw, dest), dest)
				if err != nil {
					return err
				}
				info, err := os.Stat(dest)
				if err != nil {
					return err
				}
				measured[i], sizes[i] = append(measured[i], u), info.Size()
			}
			fmt.Fprintf(os.Stderr, "bench: compression by %s: round %d of %d\n",
				method, round+1, s.rounds)
		}
		wall, cpu := func(u usage) float64 { return u.wall }, func(u usage) float64 { return u.cpu }
		for i, program := range programs {
			all, baseline := measured[i], measured[1]
			memory := median(column(all, func(u usage) float64 { return u.memory }))
			out.add(method, program.name,
				fmt.Sprintf("%.2f s", median(column(all, wall))), pairedRatio(all, baseline, wall),
				fmt.Sprintf("%.2f s", median(column(all, cpu))), pairedRatio(all, baseline, cpu),
				mib(float64(sizes[i])), fmt.Sprintf("%.3f×", float64(sizes[i])/float64(sizes[1])),
				mib(memory))
		}
	}
	out.print(os.Stdout)
	return nil
}
