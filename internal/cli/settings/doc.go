// Package settings reads a person's settings: a table of rows has the flag, the variables, the key
// in the YAML file and the field of each setting. Viper decides which value wins. This package
// reads the file, so that messages can name the line.
package settings
