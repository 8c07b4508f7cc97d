package status

// Progress is what a command that fetches something says of itself, at its address.
type Progress struct {
	Done  int64 `json:"done"`  // bytes
	Total int64 `json:"total"` // bytes; 0: not known yet
}
