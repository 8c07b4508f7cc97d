package nbd

// peer is the name under which the connections of one client are counted: nobody can make up many.
func (c *conn) peer() string {
	if c.certified {
		return c.name
	}
	return c.name + " " + c.Source
}

// tlsCost is how many bytes a connection with TLS counts for in the limit of memory: buffers of
// crypto/tls for records in both directions.
const tlsCost = 32 << 10

// cost is what a connection counts for as long as it lasts.
func (c *conn) cost() int64 {
	if c.certified {
		return tlsCost
	}
	return 0
}
