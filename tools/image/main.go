// SPDX-License-Identifier: Apache-2.0

// Image makes container images of programs that are built already, as tar files that a
// runtime imports: no registry, no image engine, no base image. The same programs give
// the same bytes, whoever makes the image, and when.
//
// It refuses what is not static: there is no C library in an image, and such a program
// would say no more than "no such file or directory" at its start. Only ztunnel, which
// others build, gets the libraries that it needs, from this machine.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// programsDir is where the programs are in an image. It is on PATH.
const programsDir = "usr/local/bin"

// image is one image: its entry point is the first of its programs.
type image struct {
	name     string // of the tar file
	programs []string
	onDemand bool // made only when named
}

// The program of an image that this project does not build.
const ztunnel = "ztunnel"

// images are all that there are. The names are what deploy's manifests ask for.
func (c config) images() []image {
	return []image{
		// No iptables: the nftables backend speaks netlink and starts no program.
		{name: "ambientd", programs: []string{"ambientd", "ambient-cni"}},
		{name: "devproxy", programs: []string{"devproxy"}},
		{name: "testapp", programs: []string{"testapp"}},
		// All of a node in one: make dev-image.
		{name: "ambientd-dev", programs: []string{"ambientd", "ambient-cni", c.nodeProxy}, onDemand: true},
	}
}

// config is what the flags say.
type config struct {
	bin, out, arch, tag string
	nodeProxy           string   // of ambientd-dev
	only                []string // names of images; all if empty
}

func main() {
	err := run(os.Args[1:], os.Stdout, os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

// run makes the images and prints the path of each.
func run(args []string, stdout, usage io.Writer) error {
	cfg, err := parse(args, usage)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.out, 0o755); err != nil {
		return fmt.Errorf("making the images' directory: %w", err)
	}
	for _, img := range cfg.images() {
		if !cfg.wants(img) {
			continue
		}
		path := filepath.Join(cfg.out, img.name+".tar")
		if err := cfg.write(img, path); err != nil {
			return fmt.Errorf("making image %s: %w", img.name, err)
		}
		if _, err := fmt.Fprintln(stdout, path); err != nil {
			return fmt.Errorf("saying where the image is: %w", err)
		}
	}
	return nil
}

func parse(args []string, usage io.Writer) (config, error) {
	var c config
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	flags.SetOutput(usage)
	flags.StringVar(&c.bin, "bin", "bin", "`directory` of the static programs")
	flags.StringVar(&c.out, "out", "out/image", "`directory` for the tar files")
	flags.StringVar(&c.arch, "arch", "", "`architecture` of the programs, as Go names it; required")
	flags.StringVar(&c.tag, "tag", "dev", "`tag` of the images localhost/NAME")
	flags.StringVar(&c.nodeProxy, "node-proxy", "devproxy", "`program` beside ambientd in ambientd-dev: devproxy or ztunnel")
	if err := flags.Parse(args); err != nil {
		return config{}, err
	}
	if c.arch == "" {
		return config{}, errors.New("--arch is required: say what the programs were built for, such as amd64")
	}
	known := c.images()
	for _, name := range flags.Args() {
		if !slices.ContainsFunc(known, func(i image) bool { return i.name == name }) {
			return config{}, fmt.Errorf("there is no image %q, only %s", name, names(known))
		}
	}
	c.only = flags.Args()
	return c, nil
}

func (c config) wants(img image) bool {
	if len(c.only) == 0 {
		return !img.onDemand
	}
	return slices.Contains(c.only, img.name)
}

func names(all []image) string {
	var list []string
	for _, i := range all {
		list = append(list, i.name)
	}
	return strings.Join(list, ", ")
}
