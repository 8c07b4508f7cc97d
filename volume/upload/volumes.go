package upload

import "context"

// Volumes are the volumes that data goes to. Their methods are called by any number of goroutines.
type Volumes interface {
	// Fill claims a volume that awaits content: nobody else fills it until Release. made says that
	// the volume was not there, and was made to be filled, which is only done if make is set.
	Fill(ctx context.Context, name string, make bool) (v Volume, made bool, err error)
	// Delete removes a volume that was made to be filled, and that no upload has filled.
	Delete(ctx context.Context, name string) error
}

// Volume is a volume that is being filled. Progress may be called while another method is.
type Volume interface {
	Dir() string              // for the disk, and the files of the upload
	Context() context.Context // ends when the upload must end
	Size() int64              // of the disk, bytes; 0: that of the data
	Reserve(size int64) error // checks whether the volume may have that size, before data is taken
	// Progress tells how far the upload is, bytes. total 0: nobody knows.
	Progress(received, total int64)
	// Complete serves the volume. image "": the disk is the file disk.img in Dir. Otherwise image
	// is the name of a file in Dir that is an image, and goes when it is no longer needed. After an
	// error the volume awaits content as before.
	Complete(ctx context.Context, image string) error
	Release() // is called last
}
