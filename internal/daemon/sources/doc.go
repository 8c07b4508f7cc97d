// Package sources finds the images that a daemon serves: in a directory, in registries, and in
// container images that become bootable disks. It also finds disks that other servers have.
//
// A daemon makes one Sources. Find returns the images to serve from the start, for a plan; volumes
// open images by Local and Stream. All images in registries share one client and one cache, which
// is opened when first needed. Errors say which setting would help.
package sources
