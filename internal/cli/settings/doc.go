// Package settings reads what a person sets: a table of rows says the flag, the variables, the key
// in the YAML file and the field of each setting. Viper decides which value wins. The file is read
// here, so that a message can name its line.
package settings
