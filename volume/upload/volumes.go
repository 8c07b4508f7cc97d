package upload

import "context"

// Volumes are the volumes that data goes to. Any number of goroutines may call their methods.
type Volumes interface {
	// Fill claims a volume that awaits content: nobody else can fill it until Release. If make is
	// set, it makes a missing volume, and then made is true.
	Fill(ctx context.Context, name string, make bool) (v Volume, made bool, err error)
}

// Volume is a volume that is being filled. Progress may be called during any other method.
type Volume interface {
	Dir() string              // for the disk, and the files of the upload
	Context() context.Context // ends when the upload must end
	Size() int64              // of the disk, bytes; 0: that of the data
	Reserve(size int64) error // checks whether the volume may have that size, before data is taken
	// Progress notes how far the upload is, in bytes. total 0: unknown.
	Progress(received, total int64)
	// Complete serves the volume. With image "", the disk is the file disk.img in Dir. Otherwise
	// image is the name of an image file in Dir, which is removed when it is no longer needed.
	// After an error the volume awaits content as before.
	Complete(ctx context.Context, image string) error
	// Undo removes the volume, which was made for an upload and has not been filled.
	Undo(ctx context.Context) error
	Release() // is called last
}
